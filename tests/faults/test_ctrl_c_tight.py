"""Ctrl-C with no memory to spare: what was taken for the broken step is there for its commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_lightning.engine.binding import Binder
from mt_lightning.engine.steps import Steps
from mt_lightning.pager.pool import WeightPool

from ..durability.nets import assert_same, committed_step, fit, paged, smallest_gb
from .test_ctrl_c import MAX_STEPS, Watched

PLACES: dict[str, tuple[type, str]] = {
    "a page has been pinned": (WeightPool, "pin"),
    "a page has been read ahead": (WeightPool, "prefetch"),
    "a page has been bound": (Binder, "bind"),
    "a page is about to be let go": (Binder, "unbind"),
    "an update is about to begin": (Steps, "before_use"),
}


def places() -> Iterator[Any]:
    """Yield every place, and with one durability or the other some that run always."""
    for i, place in enumerate(PLACES):
        for j, durability in enumerate(("step", "checkpoint")):
            for nth in (0, 3):
                marks = [pytest.mark.slow] if nth or (i + j) % 2 else []
                yield pytest.param(place, durability, nth, marks=marks)


@pytest.mark.parametrize(("place", "durability", "nth"), list(places()))
def test_the_finished_steps_are_committed(
    tmp_path: Path, place: str, durability: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"max_ram_gb": smallest_gb(Watched(), durability=durability)}
    kind, name = PLACES[place]
    inner: Callable[..., Any] = getattr(kind, name)
    module, num_calls = Watched(), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        result = inner(*args, **kwargs)
        if module.under_way and threading.current_thread() is threading.main_thread():
            num_calls += 1
            if num_calls == nth + 1:
                raise KeyboardInterrupt
        return result

    monkeypatch.setattr(kind, name, interrupted)
    strategy = paged(tmp_path, durability=durability, **budget)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(module, strategy, max_steps=MAX_STEPS, gradient_clip_val=0.5)
    strategy._close()
    assert committed_step(tmp_path) >= len(module.losses) - 1
    resumed, plain = Watched(), Watched()
    strategy = paged(tmp_path, durability=durability, on_existing="resume", **budget)
    fit(resumed, strategy, max_steps=MAX_STEPS, gradient_clip_val=0.5)
    fit(plain, max_steps=MAX_STEPS, gradient_clip_val=0.5)
    assert_same(resumed, plain)
