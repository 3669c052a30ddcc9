"""Memory that the heap keeps is counted, and given back before it would break the budget."""

from __future__ import annotations

from mt_lightning.pager.budget import Budget
from mt_lightning.pager.kept_heap import KeptHeap
from mt_lightning.tiers.heap import OwnMemory

LIMIT = 1000


class Process:
    """A process of which only the amounts are real: frames, what is counted, activations."""

    def __init__(self, frames: int = 0) -> None:
        self.budget = Budget(LIMIT)
        if frames:
            self.budget.reserve(frames, "weights")
        self.frames = frames
        self.live = 50
        self.free = 0
        self.num_given_back = 0
        self.kept = KeptHeap(self.budget, self.give_back, self.anonymous)

    def anonymous(self) -> int:
        counted = self.budget.used_bytes - self.kept.framed_bytes
        return self.frames + counted + self.live + self.free

    def give_back(self) -> None:
        self.free = 0
        self.num_given_back += 1

    def check(self) -> None:
        self.kept.check(self.frames)

    def run_unit(self, nbytes: int) -> None:
        """Take so many bytes for activations, free heap first, and free them again."""
        self.free = max(self.free, nbytes)


def test_freed_counted_memory_stays_counted_until_it_is_given_back() -> None:
    process = Process()
    kept = process.kept
    gradients = process.budget.reserve(300, "gradients")
    kept.took()
    assert kept.kept_bytes() == 0
    gradients.free()
    assert kept.kept_bytes() == 300
    assert kept.kept_bytes(coming=100) == 200
    again = process.budget.reserve(200, "graphs")
    kept.took()
    assert kept.kept_bytes() == 100
    kept.give_back()
    assert kept.kept_bytes() == 0
    again.free()
    assert kept.kept_bytes() == 200


def test_frames_are_not_taken_for_heap() -> None:
    process = Process()
    for purpose in ("weights", "state", "input frames"):
        process.budget.reserve(100, purpose).free()
        process.kept.took()
    assert process.kept.kept_bytes() == 0


def test_the_heap_is_given_back_where_memory_is_short() -> None:
    process = Process(frames=LIMIT)
    process.check()
    process.free = LIMIT // 8
    process.check()
    assert not process.num_given_back
    process.free += 1
    process.check()
    assert process.num_given_back == 1


def test_the_heap_is_left_alone_where_the_budget_has_room() -> None:
    process = Process(frames=100)
    process.check()
    process.free = LIMIT - 100
    process.check()
    assert not process.num_given_back


def test_what_lives_is_not_trimmed_for_again_and_again() -> None:
    process = Process(frames=LIMIT)
    process.check()
    process.live += 400
    process.check()
    assert process.num_given_back == 1
    for _ in range(5):
        process.check()
    assert process.num_given_back == 1


def test_what_each_unit_takes_is_left_for_the_next_one() -> None:
    process = Process(frames=LIMIT)
    process.check()
    for _ in range(10):
        process.run_unit(400)
        process.check()
    assert process.num_given_back == 1
    process.free += LIMIT // 16
    process.check()
    assert process.num_given_back == 1
    process.free += 1
    process.check()
    assert process.num_given_back == 2


def test_what_gathers_over_many_units_is_not_taken_for_what_one_needs() -> None:
    process = Process(frames=LIMIT)
    process.check()
    for _ in range(40):
        process.free += LIMIT // 16
        process.check()
        assert process.free <= LIMIT // 4
    assert process.num_given_back >= 10


def test_freed_gradients_are_not_taken_for_what_a_unit_needs() -> None:
    process = Process(frames=LIMIT - 300)
    process.check()
    for _ in range(2):
        gradients = process.budget.reserve(300, "gradients")
        process.kept.took()
        process.run_unit(200)
        gradients.free()
        process.free += 300
        process.check()
    most = process.anonymous() - process.kept.excess_bytes()
    assert most == LIMIT + process.live + 200 + LIMIT // 16


def test_own_memory_follows_what_the_process_takes() -> None:
    memory = OwnMemory()
    before = memory.anonymous_bytes()
    block = bytearray(b"x") * (64 << 20)
    assert 60 << 20 <= memory.anonymous_bytes() - before <= 80 << 20
    del block
