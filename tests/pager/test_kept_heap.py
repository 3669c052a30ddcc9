"""Memory that the heap keeps is counted, and given back before it would break the budget."""

from __future__ import annotations

from mt_lightning.pager.budget import Budget
from mt_lightning.pager.kept_heap import KeptHeap
from mt_lightning.tiers.heap import OwnMemory

LIMIT = 1000


class Process:
    """A heap of which only the amounts are real."""

    def __init__(self) -> None:
        self.budget = Budget(LIMIT)
        self.free = 0
        self.live = 50
        self.num_given_back = 0
        self.kept = KeptHeap(self.budget, self.give_back, lambda: self.live + self.free)

    def give_back(self) -> None:
        self.free = 0
        self.num_given_back += 1


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
    process = Process()
    process.budget.reserve(LIMIT, "weights")
    process.kept.check(0)
    process.free = LIMIT // 8
    process.kept.check(0)
    assert not process.num_given_back
    process.free += 1
    process.kept.check(0)
    assert process.num_given_back == 1


def test_the_heap_is_left_alone_where_the_budget_has_room() -> None:
    process = Process()
    process.budget.reserve(100, "weights")
    process.kept.check(0)
    process.free = LIMIT - 100
    process.kept.check(0)
    assert not process.num_given_back


def test_what_lives_is_not_trimmed_for_again_and_again() -> None:
    process = Process()
    process.budget.reserve(LIMIT, "weights")
    process.kept.check(0)
    process.live += 400
    process.kept.check(0)
    assert process.num_given_back == 1
    for _ in range(5):
        process.kept.check(0)
    assert process.num_given_back == 1


def test_own_memory_follows_what_the_process_takes() -> None:
    memory = OwnMemory()
    before = memory.anonymous_bytes()
    block = bytearray(b"x") * (64 << 20)
    assert 60 << 20 <= memory.anonymous_bytes() - before <= 80 << 20
    del block
