"""The simulator knows every byte that a run moves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mt_lightning.tiers.doubles import ThrottledStore

from .cases import gpt_case
from .gpt import train
from .simulator import Simulator

NUM_STEPS = 3
MODES = {
    "eager": {"deferred": False, "micro_batches": 1},
    "clipped": {"deferred": True, "micro_batches": 1},
    "eager_2": {"deferred": False, "micro_batches": 2},
    "clipped_2": {"deferred": True, "micro_batches": 2},
    "eager_4": {"deferred": False, "micro_batches": 4},
    "clipped_4": {"deferred": True, "micro_batches": 4},
}
OFTEN = [("smallest", 0), ("smallest", 1), ("middle", 1), ("everything", 2), ("smallest", 2)]
SELDOM = {"middle": (0, 2), "tight": (0, 1, 2, 4), "roomy": (0, 1, 2), "everything": (0, 1)}


def places() -> Iterator[Any]:
    """Yield every mode with every budget and depth; half of the usual ones run always."""
    for i, mode in enumerate(MODES):
        for j, place in enumerate(OFTEN):
            yield pytest.param(
                mode, *place, marks=[pytest.mark.slow] if (i + i // 2 + j) % 2 else []
            )
        for budget, depths in SELDOM.items():
            for depth in depths:
                yield pytest.param(mode, budget, depth, marks=pytest.mark.slow)


# Those that time may not change; `faults` also counts reads that are still under way.
COUNTERS = (
    "steps", "commits", "pins", "reloads", "evictions", "prefetches", "spills",
    "bytes_read", "bytes_written", "ram_peak_bytes",
)  # fmt: skip


@pytest.mark.parametrize(("mode", "budget", "depth"), list(places()))
def test_bytes_are_predicted(mode: str, budget: str, depth: int, tmp_path: Path) -> None:
    case = gpt_case(budget=budget, depth=depth, **MODES[mode])
    moved = train(
        tmp_path, budget_bytes=case.budget_bytes, depth=depth, num_steps=NUM_STEPS, **MODES[mode]
    )
    assert moved.schedule == ("deferred" if case.deferred else "eager")
    assert moved.bytes == list(Simulator(case).run(NUM_STEPS))
    assert moved.stats["ram_peak_bytes"] <= case.budget_bytes
    if budget == "everything":
        assert moved.bytes[-1][0] == 0


@pytest.mark.parametrize("budget", ["smallest", "middle", "roomy"])
@pytest.mark.parametrize("mode", ["eager", "clipped_2"])
def test_bytes_of_sliced_pages_are_predicted(mode: str, budget: str, tmp_path: Path) -> None:
    sizes = {"depth": 2, **MODES[mode]}
    case = gpt_case(budget=budget, slice_bytes=16384, **sizes)
    moved = train(
        tmp_path, budget_bytes=case.budget_bytes, num_steps=NUM_STEPS, _slice_bytes=16384, **sizes
    )
    assert moved.bytes == list(Simulator(case).run(NUM_STEPS))


@pytest.mark.parametrize(
    ("mode", "budget"),
    [pytest.param("eager", "tight", marks=pytest.mark.slow), ("clipped_2", "smallest")],
)
def test_the_speed_of_the_drive_changes_nothing(mode: str, budget: str, tmp_path: Path) -> None:
    case = gpt_case(budget=budget, depth=2, **MODES[mode])
    speeds = {"fast": None, "again": None, "slow_reads": (30e6, 1e9), "slow_writes": (1e9, 30e6)}
    counters = {}
    for name, speed in speeds.items():
        settings = {}
        if speed is not None:
            read, write = speed
            settings["_wrap_store"] = functools.partial(
                ThrottledStore, read_bytes_per_s=read, write_bytes_per_s=write
            )
        moved = train(
            tmp_path / name,
            budget_bytes=case.budget_bytes,
            depth=2,
            num_steps=NUM_STEPS,
            **MODES[mode],
            **settings,
        )
        counters[name] = {key: moved.stats[key] for key in COUNTERS}, moved.bytes
    assert all(found == counters["fast"] for found in counters.values()), counters
