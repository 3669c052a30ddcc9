"""The pool against a dict: whatever is asked in whatever order, no byte is lost and none is extra.

The machine plays training: it pins and releases pages, reads ahead, changes pinned frames, holds
gradients, keeps views of frames as autograd does, and commits. The model is a dict of bytes.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from mt_lightning.errors import BudgetError
from mt_lightning.pager.budget import Budget, Reservation
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.layout import lay_out
from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.pages.state import StateLayout
from mt_lightning.pages.table import Page, new_page
from mt_lightning.tiers.arena import Arena, Frame
from mt_lightning.tiers.doubles import MemoryStore
from mt_lightning.tiers.io import IOQueue

NUM_PAGES = 5
PLANES = (1, 2, 1, 3, 2)
"""Size of each page in blocks of 4096 bytes."""


def make_page(index: int, num_blocks: int) -> Page:
    weight = torch.empty(num_blocks * ALIGN_BYTES // 4 - 1, device="meta")
    layout = lay_out(index, (f"unit{index}",), 0, [(f"w{index}", weight, (1,))])
    assert layout.nbytes == num_blocks * ALIGN_BYTES
    return new_page(layout, StateLayout(True, (), (), 0))


class PoolMachine(RuleBasedStateMachine):
    pins = Bundle("pins")
    views = Bundle("views")
    reservations = Bundle("reservations")

    @initialize(num_blocks=st.integers(4, 8))
    def open(self, num_blocks: int) -> None:
        self.budget = Budget(num_blocks * ALIGN_BYTES)
        self.arena = Arena()
        self.store = MemoryStore()
        self.io = IOQueue(self.store, num_threads=2)
        self.stats = Stats()
        self.pool = WeightPool(self.arena, self.budget, self.store, self.io, self.stats)
        self.next_use: dict[int, float] = {}
        self.pool.next_use = lambda page: self.next_use.get(page, inf)
        self.pages = [make_page(i, n) for i, n in enumerate(PLANES)]
        self.model = {page.index: bytes(page.layout.nbytes) for page in self.pages}
        self.held: Counter[int] = Counter()
        self.committed = dict(self.model)
        self.bytes_reserved = 0
        self.seen: dict[int, tuple[torch.Tensor, bytes]] = {}
        self.next_view = self.num_forgotten = 0

    def teardown(self) -> None:
        if hasattr(self, "io"):
            self.io.close()

    # -- weights ----------------------------------------------------------------------------------

    @rule(target=pins, index=st.integers(0, NUM_PAGES - 1))
    def pin(self, index: int) -> Any:
        page = self.pages[index]
        try:
            entry = self.pool.pin(page)
        except BudgetError:
            assert self.pool.entry(page) is None
            self.nothing_is_idle(page.layout.nbytes)
            return multiple()
        self.held[index] += 1
        return entry

    @rule(entry=consumes(pins))
    def release(self, entry: PoolEntry) -> None:
        self.pool.release(entry)
        self.held[entry.page.index] -= 1

    @rule(target=pins, index=st.integers(0, NUM_PAGES - 1))
    def prefetch(self, index: int) -> Any:
        page, before = self.pages[index], set(self.present())
        self.dirty_before = {i: self.pool.entry(self.pages[i]).dirty for i in before}
        entry = self.pool.prefetch(page)
        if entry is None:
            assert set(self.present()) == before, "frames were dropped in vain"
            return multiple()
        own = self.next_use.get(index, inf)
        for dropped in before - set(self.present()):
            assert self.next_use.get(dropped, inf) >= own, "needed sooner than what was read ahead"
            assert not self.dirty_before[dropped], "reading ahead wrote something back"
        self.held[index] += 1
        return entry

    @rule(index=st.integers(0, NUM_PAGES - 1), distance=st.sampled_from([1, 2, 3, 9, 27, inf]))
    def predict(self, index: int, distance: float) -> None:
        """Expect anything of a page, right or wrong."""
        self.next_use[index] = distance

    @rule(entry=pins, seed=st.integers(0, 255))
    def change(self, entry: PoolEntry, seed: int) -> None:
        entry.wait()
        entry.frame.tensor.copy_(torch.arange(entry.frame.nbytes).add_(seed).to(torch.uint8))
        entry.dirty = True
        self.model[entry.page.index] = bytes(entry.frame.memory)
        # Who still sees this very frame sees the change.
        address = entry.frame.tensor.data_ptr()
        for key, (view, _) in self.seen.items():
            if view.data_ptr() == address:
                self.seen[key] = view, self.model[entry.page.index]

    @rule(index=st.integers(0, NUM_PAGES - 1), seed=st.none() | st.integers(0, 255))
    def visit(self, index: int, seed: int | None) -> None:
        """Use a page for a moment, as one unit after the other does."""
        entry = self.pin(index)
        if isinstance(entry, PoolEntry):
            if seed is not None:
                self.change(entry, seed)
            entry.wait()
            assert bytes(entry.frame.memory) == self.model[index]
            self.release(entry)

    @rule(index=st.integers(0, NUM_PAGES - 1))
    def begin_to_read(self, index: int) -> None:
        """Read ahead and let go while the read may be under way."""
        entry = self.prefetch(index)
        if isinstance(entry, PoolEntry):
            self.release(entry)

    @rule(entry=pins)
    def copy_on_write(self, entry: PoolEntry) -> None:
        entry.wait()
        try:
            twin = self.pool.copy_on_write(entry.page)
        except BudgetError:
            self.nothing_is_idle(entry.page.layout.nbytes)
            return
        assert twin is entry
        assert bytes(twin.frame.memory) == self.model[entry.page.index]

    @rule(target=views, entry=pins)
    def look(self, entry: PoolEntry) -> int:
        entry.wait()
        self.next_view += 1
        self.seen[self.next_view] = entry.frame.tensor[:], self.model[entry.page.index]
        return self.next_view  # not the view: a bundle would keep it

    @rule(key=consumes(views))
    def look_away(self, key: int) -> None:
        del self.seen[key]

    # -- gradients --------------------------------------------------------------------------------

    @rule(target=reservations, num_blocks=st.integers(1, 4))
    def reserve(self, num_blocks: int) -> Any:
        nbytes = num_blocks * ALIGN_BYTES
        try:
            reservation = self.pool.reserve(nbytes, "gradients", "some gradients")
        except BudgetError:
            self.nothing_is_idle(nbytes)
            return multiple()
        self.bytes_reserved += nbytes
        return reservation

    @rule(reservation=consumes(reservations))
    def free(self, reservation: Reservation) -> None:
        self.bytes_reserved -= reservation.nbytes
        reservation.free()
        reservation.free()

    # -- commits ----------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        self.the_store_holds_everything()
        num_written = self.store.bytes_written
        self.pool.flush()
        assert self.store.bytes_written == num_written, "clean pages were written"

    @rule()
    def commit(self) -> None:
        self.pool.flush()
        for page in self.pages:
            page.commit()
        self.committed = dict(self.model)

    @precondition(lambda self: not sum(self.held.values()))
    @rule(lose=st.booleans())
    def clear(self, lose: bool) -> None:
        """Forget every frame; with `lose`, whatever was not committed too."""
        if not lose:
            self.pool.flush()
        self.num_forgotten += sum(entry.ahead for entry in self.pool.entries())
        self.pool.clear()
        assert not self.present()
        if lose:
            for page in self.pages:
                page.rollback()
            self.model = dict(self.committed)
        self.the_store_holds_everything()
        kept_bytes = sum(self.orphans().values())
        assert self.budget.by_purpose["weights"] == kept_bytes, "frames without views stay reserved"

    # -- what always holds ------------------------------------------------------------------------

    def orphans(self) -> dict[int, int]:
        """Return address and size of every frame that only views keep."""
        shown = {self.pool.entry(self.pages[i]).frame.tensor.data_ptr() for i in self.present()}
        views = (view for view, _ in self.seen.values())
        return {v.data_ptr(): v.numel() for v in views if v.data_ptr() not in shown}

    def present(self) -> list[int]:
        return [page.index for page in self.pages if self.pool.entry(page) is not None]

    def nothing_is_idle(self, nbytes: int) -> None:
        """Check that a refusal was right: what nobody uses and what is free are not enough."""
        entries = [self.pool.entry(self.pages[index]) for index in self.present()]
        idle_bytes = sum(e.frame.nbytes for e in entries if not e.pins and not e.frame.in_use())
        assert self.budget.available_bytes + idle_bytes < nbytes

    def the_store_holds_everything(self) -> None:
        for page in self.pages:
            if page.weight.slot is None:
                assert not any(self.model[page.index])
                continue
            frame = Frame(page.weight.nbytes)
            self.store.read(page.weight.file, 0, frame.memory)
            assert bytes(frame.memory) == self.model[page.index]

    @invariant()
    def budget_is_kept(self) -> None:
        if not hasattr(self, "budget"):
            return
        assert 0 <= self.budget.used_bytes <= self.budget.peak_bytes <= self.budget.limit_bytes
        assert self.budget.by_purpose["gradients"] == self.bytes_reserved
        assert self.budget.used_bytes == sum(self.budget.by_purpose.values())
        # Real memory, free frames kept for reuse included, stays inside too.
        assert self.arena.held_bytes + self.bytes_reserved <= self.budget.limit_bytes

    @invariant()
    def what_was_read_ahead_is_used_or_wasted_or_waits(self) -> None:
        if not hasattr(self, "pool"):
            return
        entries = self.pool.entries()
        assert self.pool.unused_bytes == sum(e.frame.nbytes for e in entries if e.ahead)
        stats, waiting = self.stats, sum(e.ahead for e in entries)
        known = stats.prefetches_used + stats.prefetches_wasted + waiting + self.num_forgotten
        assert stats.prefetches == known

    @invariant()
    def pinned_pages_stay(self) -> None:
        for index, count in getattr(self, "held", {}).items():
            entry = self.pool.entry(self.pages[index])
            if count:
                assert entry is not None
                assert entry.pins == count
                entry.wait()
                assert bytes(entry.frame.memory) == self.model[index]
            elif entry is not None:
                assert not entry.pins

    @invariant()
    def views_keep_what_they_saw(self) -> None:
        for view, old in getattr(self, "seen", {}).values():
            assert bytes(view.numpy()) == old


@pytest.mark.timeout(120)
class TestPool(PoolMachine.TestCase):
    settings = settings(
        max_examples=60,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
