"""A unit that cannot be brought in holds nothing: an error may be caught, and training go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

import mt_lightning as mt
from mt_lightning.engine.binding import Binder
from mt_lightning.engine.gradients import Gradients
from mt_lightning.pager.pool import PoolEntry, WeightPool

from .nets import Net, loader, make_trainer


class _Pins(Callback):
    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.bound: list[int] = []

    def on_exception(self, trainer: Any, *_: Any) -> None:
        live = trainer.strategy.engine.live
        live._end_dead_backward()
        live.run.worker.drain()  # an update that waits holds its page
        resident = set(live.run.build.resident)
        pages = [page for page in live.run.build.table if page.index not in resident]
        entries = [live.run.pool.entry(page) for page in pages]
        self.left = {e.page.index: e.pins for e in entries if e is not None and e.pins}
        self.bound = [page.index for page in pages if live.run.binder.is_bound(page)]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(WeightPool, "pin"), (Gradients, "expect"), (PoolEntry, "wait"), (Binder, "bind")],
)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_what_was_pinned_for_it_is_let_go(
    owner: type,
    name: str,
    call: int,
    recompute: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, pins, real, count = Net(), _Pins(), getattr(owner, name), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += module.global_step > 0
        if count == call:
            count += 1
            raise OSError("cannot be brought in")
        return real(*args, **kwargs)

    strategy = mt.MegaTrainStrategy(tmp_path / "pages", recompute=recompute)
    trainer = make_trainer(tmp_path, strategy, max_steps=3, callbacks=[pins])
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(OSError, match="cannot be brought in"):
        trainer.fit(module, loader(8))
    assert pins.left == {}
    assert pins.bound == []
