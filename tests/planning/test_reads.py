"""What a plan says of reads is what the independent simulator of the tests reads."""

from __future__ import annotations

import pytest

from tests.bytes.simulator import Simulator

from .test_simulation import WIDTH, case_of, stack

PAGE_BYTES = 4 * WIDTH * (WIDTH + 1)


def compare(frames: float, *, clips: bool, micros: int) -> tuple[float, int]:
    """Return what a step reads as it is simulated, and as the plan says."""
    found = stack(int((10 + frames) * PAGE_BYTES), clips=clips, micros=micros)
    ends = list(Simulator(case_of(found, clips=clips, micros=micros)).run(6))[micros - 1 :: micros]
    assert found.plan is not None
    return (ends[5][0] - ends[3][0]) / 2, found.plan.read_bytes


@pytest.mark.parametrize("frames", [0, 1.2, 2.2, 3.5, 5, 8])
def test_a_plan_counts_what_waiting_updates_hold(frames: float) -> None:
    simulated, planned = compare(frames, clips=False, micros=1)
    assert planned == pytest.approx(simulated, rel=0.001)


@pytest.mark.parametrize(("clips", "micros"), [(False, 3), (False, 5), (True, 1), (True, 3)])
def test_a_plan_counts_gradients_as_they_come_and_go(clips: bool, micros: int) -> None:
    for frames in (1.2, 3.5, 8):
        simulated, planned = compare(frames, clips=clips, micros=micros)
        assert planned == pytest.approx(simulated, rel=0.12)
