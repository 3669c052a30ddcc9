"""Ctrl-C on any line costs the step under way at most, and leaves no page a step behind."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import Tensor

from mt_lightning.engine.gradients import PageGrads
from mt_lightning.engine.step_commits import StepCommits
from mt_lightning.engine.steps import Steps
from mt_lightning.engine.update import Updater
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.pager.pool import WeightPool
from mt_lightning.tiers.uninterrupted import interrupt_waits, uninterrupted

from ..durability.nets import Tiny, adamw, assert_same, committed_step, fit, paged

RUNS: dict[str, dict[str, Any]] = {
    "step, eager": {"durability": "step"},
    "step, deferred": {"durability": "step", "gradient_clip_val": 0.5},
    "checkpoint": {"durability": "checkpoint"},
}
MAX_STEPS = 7


@pytest.fixture(autouse=True)
def _the_usual_handler() -> Iterator[None]:
    before, tracing = signal.getsignal(signal.SIGINT), sys.gettrace()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.settrace(tracing)
    signal.signal(signal.SIGINT, before)


class Watched(Tiny):
    """Tells when its fourth to sixth steps are taken."""

    under_way = False

    def __init__(self) -> None:
        super().__init__(adamw, scaled=True)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.under_way = 3 <= self.global_step < 6


def go(directory: Path, durability: str, module: Tiny, **settings: Any) -> None:
    existing = settings.pop("on_existing", "error")
    strategy = paged(directory, durability=durability, on_existing=existing)
    try:
        fit(module, strategy, max_steps=MAX_STEPS, **settings)
    finally:
        strategy._close()


def check(directory: Path, run: str, module: Watched) -> None:
    """See that an interrupted run has lost one step at most, and goes on to the same end."""
    settings = dict(RUNS[run])
    durability = settings.pop("durability")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        go(directory, durability, module, **settings)
    sys.settrace(None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert committed_step(directory) >= len(module.losses) - 1
    resumed = Watched()
    go(directory, durability, resumed, on_existing="resume", **settings)
    plain = Watched()
    fit(plain, max_steps=MAX_STEPS, **settings)
    assert_same(resumed, plain)
    assert resumed.losses == plain.losses[-len(resumed.losses) :]


PLACES: dict[str, tuple[type, str]] = {
    "an update waits for its page": (UpdateWorker, "retire_page"),
    "an update pins its page": (WeightPool, "pin"),
    "an update looks at its gradients": (PageGrads, "must_be_whole"),
    "an update is queued": (UpdateWorker, "submit"),
    "something small is updated": (Updater, "update"),
    "a step is counted": (StepCommits, "stepped"),
    "a step ends": (StepCommits, "end_step"),
    "a commit is due": (StepCommits, "submit"),
    "all is flushed": (Steps, "flush"),
}


def places() -> Iterator[Any]:
    """Yield every place in every run, at its first call and a later one; a part runs always."""
    for i, place in enumerate(PLACES):
        for j, run in enumerate(RUNS):
            for nth in (0, 2):
                marks = [pytest.mark.slow] if nth or (i + j) % 3 == 2 else []
                yield pytest.param(place, run, nth, marks=marks)


@pytest.mark.parametrize(("place", "run", "nth"), list(places()))
def test_wherever_the_training_thread_is(
    tmp_path: Path, place: str, run: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name = PLACES[place]
    inner: Callable[..., Any] = getattr(kind, name)
    module, num_calls = Watched(), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if module.under_way and threading.current_thread() is threading.main_thread():
            num_calls += 1
            if num_calls == nth + 1:
                signal.raise_signal(signal.SIGINT)
        return inner(*args, **kwargs)

    monkeypatch.setattr(kind, name, interrupted)
    check(tmp_path, run, module)


class Traced(Watched):
    """Is interrupted on one of the lines that the training thread runs in three steps."""

    def __init__(self, line: int | None) -> None:
        super().__init__()
        self.line, self.num_lines = line, 0

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        del event
        return self.each if "/mt_lightning/" in frame.f_code.co_filename else None

    def each(self, frame: FrameType, event: str, _: Any) -> Any:
        del frame
        if event == "line" and self.under_way:
            self.num_lines += 1
            if self.num_lines == self.line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.each


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 150))]
)
def test_on_any_line(tmp_path: Path, run: str, seed: int) -> None:
    settings = dict(RUNS[run])
    whole = Traced(None)
    sys.settrace(whole.enter)
    go(tmp_path / "whole", module=whole, **settings)
    sys.settrace(None)
    module = Traced(random.Random(seed).randrange(1, whole.num_lines))
    sys.settrace(module.enter)
    check(tmp_path / "run", run, module)


def test_a_block_that_is_not_interrupted_is_told_afterwards() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                assert interrupt_waits()
            done.append("the rest")
        done.append("what comes after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
    assert not interrupt_waits()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_while_the_handler_is_put_back_counts_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = signal.signal

    def put_slowly(number: int, handler: Any) -> Any:
        before = put(number, handler)
        if interrupt_waits():
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", put_slowly)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
    # Nothing is left of it: nobody hurries, and the next block ends in peace.
    assert not interrupt_waits()
    with uninterrupted():
        pass
