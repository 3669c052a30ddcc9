"""Training reads ahead what it uses; how far it looks follows the drive, the bytes do not."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pages.table import Page
from mt_lightning.tiers.doubles import ThrottledStore

from .cases import gpt_case
from .gpt import Counters, train
from .simulator import Simulator

MODES = {
    "eager": {"deferred": False, "micro_batches": 1},
    "clipped": {"deferred": True, "micro_batches": 1},
    "clipped_2": {"deferred": True, "micro_batches": 2},
}


class Faults(Counters):
    """Notes the counters after each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        self.stats.append(trainer.strategy.engine.stats.snapshot())


@pytest.fixture
def instant_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every read that was begun before a page is needed be finished by then."""
    pin = WeightPool.pin

    def wait_and_pin(pool: WeightPool, page: Page) -> PoolEntry:
        for entry in pool.entries():
            if entry.read is not None:
                entry.read._finished.wait()
        return pin(pool, page)

    monkeypatch.setattr(WeightPool, "pin", wait_and_pin)


@pytest.mark.usefixtures("instant_drive")
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_missed_and_nothing_read_in_vain(mode: str, tmp_path: Path) -> None:
    case = gpt_case(budget="middle", depth=2, num_layers=8, **MODES[mode])
    counters = Faults()
    moved = train(
        tmp_path,
        budget_bytes=case.budget_bytes,
        depth=None,
        num_steps=4,
        num_layers=8,
        counters=counters,
        **MODES[mode],
    )
    first = counters.stats[MODES[mode]["micro_batches"] - 1]
    last = counters.stats[-1]
    assert last["prefetches"] > first["prefetches"]
    assert last["faults"] == first["faults"]
    assert moved.stats["prefetches_wasted"] == 0


@pytest.mark.parametrize("mode", ["eager", "clipped_2"])
def test_the_window_follows_the_drive_and_the_bytes_do_not(mode: str, tmp_path: Path) -> None:
    case = gpt_case(budget="middle", depth=2, **MODES[mode])
    predicted = list(Simulator(case).run(3))
    for name, speed in {"fast": float("inf"), "slow": 30e6}.items():
        moved = train(
            tmp_path / name,
            budget_bytes=case.budget_bytes,
            depth=None,
            num_steps=3,
            _wrap_store=functools.partial(
                ThrottledStore, read_bytes_per_s=speed, write_bytes_per_s=float("inf")
            ),
            **MODES[mode],
        )
        # Reads that are under way at the end of a batch may be more or fewer.
        assert moved.bytes[-1][1] == predicted[-1][1]
        assert abs(moved.bytes[-1][0] - predicted[-1][0]) <= 2 * max(
            unit.weight_bytes for unit in case.units
        )
