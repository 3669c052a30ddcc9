"""Reading ahead hides what the drive can deliver, on a clock and a drive that are only counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mt_lightning.pager.budget import Budget
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pager.predictor import BACKWARD, FORWARD, INFERENCE
from mt_lightning.pager.read_ahead import ReadAhead
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.arena import Arena
from mt_lightning.tiers.doubles import MemoryStore

from .test_pool_model import make_page

COMPUTE_S = 1.0


class Request:
    def __init__(self, drive: Drive, name: str) -> None:
        self.drive, self.name, self.end_s = drive, name, None

    def done(self) -> bool:
        self.drive.work(self.drive.now_s)
        return self.end_s is not None and self.end_s <= self.drive.now_s

    def wait(self) -> None:
        while self.end_s is None:
            self.drive.work(self.drive.free_s + self.drive.read_s)
        self.drive.now_s = max(self.drive.now_s, self.end_s)


class Drive:
    """Reads one page after the other, each in the same time; nothing is moved."""

    def __init__(self, read_s: float) -> None:
        self.read_s, self.now_s, self.free_s = read_s, 0.0, 0.0
        self.waiting: list[Request] = []

    def read(self, name: str, pieces: object, sums: object = None) -> Request:
        self.work(self.now_s)
        self.free_s = max(self.free_s, self.now_s)
        self.waiting.append(Request(self, name))
        return self.waiting[-1]

    def hurry(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            self.waiting.insert(0, request)

    def work(self, until_s: float) -> None:
        while self.waiting and self.free_s < until_s:
            self.free_s += self.read_s
            self.waiting.pop(0).end_s = self.free_s


class Run:
    """Goes through units as an attached engine does."""

    def __init__(
        self, num_units: int, num_frames: int, read_s: float, depth: int | None = None
    ) -> None:
        self.drive, self.stats = Drive(read_s), Stats()
        self.pages = [make_page(index, 1) for index in range(num_units)]
        for page in self.pages:
            page.weight.advance(0, [[0]])
        limit_bytes = num_frames * ALIGN_BYTES
        self.pool = WeightPool(
            Arena(),
            Budget(limit_bytes),
            MemoryStore(),
            self.drive,  # type: ignore[arg-type]
            self.stats,
        )
        units = [[index] for index in range(num_units)]
        self.ahead = ReadAhead(units, [ALIGN_BYTES] * num_units, (), limit_bytes, depth)
        self.pool.next_use, self.pool.judge = self.ahead.next_use, self.ahead.judge
        self.pool.eager_bytes = self.ahead.largest_bytes
        self.held = None

    def step(self, accesses: Sequence[tuple[int, int]]) -> float:
        """Return how long training waited for reads."""
        waited_s = 0.0
        for unit, kind in accesses:
            if self.held is not None:
                self.pool.release(self.held)
            self.ahead.observe(unit, kind)
            self.held = entry = self.pool.pin(self.pages[unit])
            if entry.read is not None and not entry.read.done():
                self.ahead.stalled()
            begin_s = self.drive.now_s
            entry.wait()
            waited_s += self.drive.now_s - begin_s
            self.prepare()
            self.drive.now_s += COMPUTE_S
        self.ahead.predictor.end_of_step()
        return waited_s

    def prepare(self) -> None:
        kept = []
        for index in self.ahead.upcoming():
            absent = self.pool.entry(self.pages[index]) is None
            if absent and not self.ahead.lets(index, self.pool.unused_bytes):
                break
            entry = self.pool.prefetch(self.pages[index])
            if entry is None:
                break
            kept.append(entry)
        for entry in kept:
            self.pool.release(entry)


def train(*route: int) -> list[tuple[int, int]]:
    return [(u, FORWARD) for u in route] + [(u, BACKWARD) for u in reversed(route)]


NUM_UNITS, NUM_FRAMES = 24, 8
STEP = train(*range(NUM_UNITS))
READS = 2 * (NUM_UNITS - NUM_FRAMES)


@pytest.mark.parametrize("depth", [None, 1, 2, 4])
def test_with_a_fast_drive_nothing_is_waited_for_after_the_first_step(depth: int | None) -> None:
    run = Run(NUM_UNITS, NUM_FRAMES, 0.3 * COMPUTE_S, depth)
    run.step(STEP)
    run.step(STEP[:1])  # what follows the first step has never been seen
    run.step(STEP[1:])
    before = run.stats.snapshot()
    assert [run.step(STEP) for _ in range(10)] == pytest.approx([0.0] * 10)
    after = run.stats.snapshot()
    assert after["faults"] == before["faults"]
    assert after["prefetches_wasted"] == 0
    assert after["prefetches_used"] - before["prefetches_used"] == 10 * READS
    assert after["reloads"] - before["reloads"] == 10 * READS


@pytest.mark.parametrize("share", [0.5, 0.9, 1.5, 3.0])
def test_stalls_are_what_the_drive_falls_short_of(share: float) -> None:
    compute_s = len(STEP) * COMPUTE_S
    run = Run(NUM_UNITS, NUM_FRAMES, share * compute_s / READS)
    for _ in range(8):
        run.step(STEP)
    stall_s = sum(run.step(STEP) for _ in range(20)) / 20
    # At either end of the model the drive has nothing to do while the last unit runs twice: all
    # frames hold what is needed before anything that is absent.
    busy_s = compute_s - 4 * COMPUTE_S
    shortfall_s = max(share * compute_s - busy_s, 0)
    near_balance = abs(share - 1) < 0.2
    allowed_s = (0.06 if near_balance else 0.001) * compute_s
    assert shortfall_s - 1e-6 <= stall_s <= shortfall_s + allowed_s
    assert run.stats.prefetches_wasted == 0


@pytest.mark.parametrize("share", [0.5, 0.9, 1.5, 3.0])
def test_how_far_is_read_ahead_changes_time_and_not_bytes(share: float) -> None:
    read_s = share * len(STEP) * COMPUTE_S / READS
    reads, stalls = {}, {}
    for depth in (None, 0, 1, 2, 4, 8):
        run = Run(NUM_UNITS, NUM_FRAMES, read_s, depth)
        stalls[depth] = sum(run.step(STEP) for _ in range(20))
        reads[depth] = run.stats.reloads
    assert len(set(reads.values())) == 1
    assert stalls[None] <= min(stalls[0], stalls[1], stalls[2]) + 1e-9
    assert stalls[None] < 0.8 * stalls[0]


def test_evaluation_is_read_ahead_too() -> None:
    run = Run(NUM_UNITS, NUM_FRAMES, 0.5 * COMPUTE_S)
    batch = [(unit, INFERENCE) for unit in range(NUM_UNITS)]
    for _ in range(3):
        run.step(batch)
    before = run.stats.reloads
    assert [run.step(batch) for _ in range(10)] == pytest.approx([0.0] * 10)
    # Frames are kept from batch to batch; the least recently used order would keep none.
    assert run.stats.reloads - before <= 10 * (NUM_UNITS - NUM_FRAMES + 2)


def test_the_window_grows_with_stalls_and_shrinks_with_reads_in_vain() -> None:
    ahead = ReadAhead([[0], [1]], [100, 50], (), 1000)
    assert ahead.window_bytes == 200
    assert ahead.lets(0, 100)
    assert not ahead.lets(0, 101)
    for _ in range(9):
        ahead.stalled()
    assert ahead.window_bytes == 500, "half of the budget"
    for _ in range(9):
        ahead.judge(0, False)
    assert ahead.window_bytes == 200


def test_what_is_needed_now_is_read_before_what_may_be_needed() -> None:
    run = Run(NUM_UNITS, NUM_FRAMES, 4 * COMPUTE_S, 4)
    for _ in range(3):
        run.step(STEP)
    run.step(STEP[: NUM_UNITS // 2])
    assert run.drive.waiting, "reads ahead are under way"
    # The run takes another way: the one read under way is finished, then comes what is needed.
    unit = next(u for u in range(NUM_UNITS) if run.pool.entry(run.pages[u]) is None)
    assert run.step([(unit, FORWARD)]) <= 2 * run.drive.read_s


def test_wrong_guesses_do_not_push_out_what_is_used() -> None:
    """Two orders by turns at random lengths: reads stay near those of reading nothing ahead."""
    reads = {}
    for depth in (0, None):
        run = Run(NUM_UNITS, NUM_FRAMES, 0.5 * COMPUTE_S, depth)
        for number in range(60):
            route = range(NUM_UNITS) if number * 7 % 5 < 2 else range(0, NUM_UNITS, 3)
            run.step(train(*route))
        reads[depth] = run.stats.reloads
    assert reads[None] <= 1.3 * reads[0]
