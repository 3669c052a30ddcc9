"""Weight frames in RAM: pinned while needed; what is needed last is dropped first.

[Note: decisions do not depend on timing]
Every decision (what to read, what to drop, when to wait) is taken by the thread that trains, from
byte counts and the order of visits alone. A read or an update that is still under way counts as
present; whoever needs its result waits. So the bytes moved by a run are the same on a fast and on a
slow drive, and an independent simulator can predict them.

[Note: what is needed now comes first] A read that is waited for goes to the head of the queue, so
what is read ahead, or in vain, delays it by no more than the blocks that are under way.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Container

from mt_lightning.errors import BudgetError
from mt_lightning.pager.budget import Budget, Reservation
from mt_lightning.pager.entry import Entry, drop_idle
from mt_lightning.pager.kept_heap import FRAMED, KeptHeap
from mt_lightning.pager.replacement import NextUse, choose, choose_ahead, nothing_known
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page
from mt_lightning.tiers.arena import Arena, Frame
from mt_lightning.tiers.heap import OwnMemory, give_back_heap
from mt_lightning.tiers.io import IOQueue, Ticket
from mt_lightning.tiers.ledger import MEMORY
from mt_lightning.tiers.spans import Span
from mt_lightning.tiers.store import Store
from mt_lightning.tiers.uninterrupted import uninterrupted


class PoolEntry(Entry[Frame]):
    """One page's weights in RAM; dirty where no slot has them.

    Attributes:
        ahead: Whether it was read ahead and has not been used since.
        read: What fills the frame.
    """

    def __init__(self, page: Page, frame: Frame, reservation: Reservation) -> None:
        super().__init__(page, frame, reservation)
        self.ahead = False
        self.read: Ticket | None = None

    def wait(self) -> None:
        """Block until the weights have been read and checked."""
        if self.read is not None:
            self.read.wait()
            self.read = None


class WeightPool:
    """The frames of all pages whose weights are in RAM, under one budget."""

    def __init__(
        self,
        arena: Arena,
        budget: Budget,
        store: Store,
        io: IOQueue,
        stats: Stats,
    ) -> None:
        self._arena = arena
        self._budget = budget
        self._heap = KeptHeap(budget, give_back_heap, OwnMemory().anonymous_bytes)
        self._io = io
        self._store = store
        self._stats = stats
        self.relieve: Callable[[], bool] = lambda: False
        """Gives some memory back when all of it is in use; False when nothing can be given."""
        self.next_use: NextUse = nothing_known
        """When pages are expected to be needed."""
        self.judge: Callable[[int, bool], None] = lambda page, used: None
        """Told of each page that was read ahead whether it was used, or given up before."""
        self.changes: Callable[[Page], None] = lambda page: None
        """Told of a page whose frame is about to be written to; waits until it may be."""
        self.changed: Callable[[Page], None] = lambda page: None
        """Told of a page that has been written to."""
        self.unused_bytes = 0
        """Bytes of the pages that were read ahead and have not been used."""
        self.eager_bytes = 0
        """How many of them may take a frame although one in use will be needed later."""
        self._entries: OrderedDict[int, PoolEntry] = OrderedDict()
        self._orphans: list[tuple[Frame, Reservation]] = []
        self.written: set[str] = set()
        """Files written since somebody emptied this; a commit makes them durable."""

    def pin(self, page: Page) -> PoolEntry:
        """Keep `page` in RAM until released, starting to read it where absent.

        Raises:
            BudgetError: Everything else in RAM is in use and the page does not fit beside it.
        """
        entry = self._entries.get(page.index)
        self._heap.check(self._arena.held_bytes)
        self._stats.pins += 1
        if entry is None:
            self._stats.faults += 1
            self.make_room(page.layout.nbytes, f"the weights of page {page.layout.key}")
            entry = self._load(page)
        elif entry.read is not None and not entry.read.done():
            self._stats.faults += 1
        if entry.read is not None:
            self._io.hurry(entry.read)
        if entry.ahead:
            self._stats.prefetches_used += 1
            self._forget_ahead(entry)
            self.judge(page.index, True)
        self._entries.move_to_end(page.index)
        entry.pins += 1
        return entry

    def release(self, entry: PoolEntry) -> None:
        """End one pin."""
        assert entry.pins > 0
        entry.pins -= 1

    def open(self, page: Page) -> PoolEntry:
        """Pin `page` so that its frame can be written to."""
        self.changes(page)
        return self.pin(page)

    def close(self, entry: PoolEntry) -> None:
        """End one pin, after the frame was written to."""
        self.changed(entry.page)
        self.release(entry)

    def prefetch(self, page: Page) -> PoolEntry | None:
        """Pin `page` if that takes nothing from anyone who needs it sooner, else return None."""
        entry = self._entries.get(page.index)
        if entry is None:
            victims = choose_ahead(
                self._entries.values(),
                self.next_use,
                page.index,
                page.layout.nbytes - self._budget.available_bytes,
                patient=self.unused_bytes + page.layout.nbytes > self.eager_bytes,
            )
            if victims is None:
                return None
            for victim in victims:
                self._evict(victim)
            self._stats.prefetches += 1
            entry = self._load(page)
            entry.ahead = True
            self.unused_bytes += entry.nbytes
        self._entries.move_to_end(page.index)
        entry.pins += 1
        return entry

    def make_room(self, nbytes: int, what: str) -> None:
        """Drop frames, then wait for updates, until `nbytes` can be reserved.

        Raises:
            BudgetError: That many bytes cannot be had while what is in use stays.
        """
        self._collect_orphans()
        while self._budget.available_bytes < nbytes:
            victim = self._victim()
            if victim is not None:
                self._evict(victim)
                continue
            with Span("wait for memory", what, MEMORY):
                if self.relieve():
                    continue
            self._collect_orphans()
            if self._budget.available_bytes >= nbytes:
                break
            used = self._budget.describe()
            remedy = "set recompute='auto', " if self._budget.by_purpose["graphs"] else ""
            raise BudgetError(
                f"{what} need {nbytes} bytes, but only {self._budget.available_bytes} of "
                f"max_ram_gb={self._budget.limit_bytes / 2**30:.3f} GiB are not in use ({used}). "
                f"Raise max_ram_gb, {remedy}or name smaller units with units=[...]."
            )

    def can_reserve(self, nbytes: int) -> bool:
        """Drop frames that nobody uses until `nbytes` can be reserved.

        Returns:
            False where that is not enough; then none is dropped.
        """
        return drop_idle(self._entries.values, self.next_use, self._budget, nbytes, self._evict)

    def reserve(self, nbytes: int, purpose: str, what: str) -> Reservation:
        """Make room and reserve."""
        self.make_room(nbytes, what)
        self._trim(nbytes, in_heap=purpose not in FRAMED)
        reservation = self._budget.reserve(nbytes, purpose)
        self._heap.took()
        return reservation

    def copy_on_write(self, page: Page) -> PoolEntry:
        """Give `page` a fresh copy of its frame; the old one lives until its last view dies."""
        old = self._entries[page.index]
        self.make_room(page.layout.nbytes, f"a second copy of page {page.layout.key}")
        frame, reservation = self._allocate(page.layout.nbytes)
        frame.tensor.copy_(old.frame.tensor)
        with uninterrupted():
            self._orphans.append((old.frame, old.reservation))
            old.frame, old.reservation = frame, reservation
        return old

    def write_back(self, entry: PoolEntry) -> None:
        """Write a dirty frame to the slot that the last commit does not name."""
        entry.wait()
        plane = entry.page.weight
        slot = plane.next_slot
        name = f"{plane.key}.{slot}"
        self._store.prepare_write(name, plane.nbytes)
        self.written.add(name)
        ticket = self._io.write(name, [(0, entry.frame.memory)])
        ticket.wait()
        with uninterrupted():
            plane.advance(slot, [list(ticket.sums)])
            entry.dirty = False

    def flush(self) -> None:
        """Write back every dirty frame."""
        for entry in list(self._entries.values()):
            if entry.dirty:
                self.write_back(entry)

    def unpin(self, kept: Container[int]) -> None:
        """End all pins but those of the pages `kept`: nobody is left who would release them."""
        for entry in self._entries.values():
            if entry.index not in kept:
                entry.pins = 0

    def drop(self, page: Page) -> None:
        """Forget the frame of `page`, whatever it holds and for whom."""
        entry = self._entries.get(page.index)
        if entry is not None:
            self._forget_ahead(entry)
            entry.pins, entry.dirty = 0, False
            self._evict(entry)

    def clear(self) -> None:
        """Forget every frame; frames that still have views live on as orphans."""
        for entry in list(self._entries.values()):
            if entry.read is not None:
                # Nobody wants these bytes any more, so nobody minds that they could not be read.
                with contextlib.suppress(Exception):
                    entry.read.wait()
            self._forget_ahead(entry)
            entry.pins, entry.dirty, entry.read = 0, False, None
            self._evict(entry)
        self._collect_orphans()

    def entry(self, page: Page) -> PoolEntry | None:
        """Return the entry of `page` where its weights are in RAM."""
        return self._entries.get(page.index)

    def entries(self) -> list[PoolEntry]:
        """Return the entries of all pages in RAM."""
        return list(self._entries.values())

    def _load(self, page: Page) -> PoolEntry:
        with uninterrupted():
            entry = PoolEntry(page, *self._allocate(page.layout.nbytes))
            plane = page.weight
            if plane.slot is None:
                entry.frame.tensor.zero_()
            else:
                self._stats.reloads += 1
                entry.read = self._io.read(
                    plane.file, [(0, entry.frame.memory)], sums=list(plane.sums[0])
                )
            self._entries[page.index] = entry
        return entry

    def _allocate(self, nbytes: int) -> tuple[Frame, Reservation]:
        if not self._arena.has_free(nbytes):
            self._trim(nbytes)
        reservation = self._budget.reserve(nbytes, "weights")
        return self._arena.alloc(nbytes), reservation

    def _victim(self) -> PoolEntry | None:
        return choose(self._entries.values(), self.next_use)

    def _forget_ahead(self, entry: PoolEntry) -> None:
        if entry.ahead:
            entry.ahead = False
            self.unused_bytes -= entry.nbytes

    def _evict(self, entry: PoolEntry) -> None:
        assert not entry.pins
        if entry.ahead:
            self._stats.prefetches_wasted += 1
            self._forget_ahead(entry)
            self.judge(entry.index, False)
        if entry.read is not None:
            self._io.hurry(entry.read)
        entry.wait()
        if entry.dirty:
            self.write_back(entry)
        with uninterrupted():
            del self._entries[entry.page.index]
            self._stats.evictions += 1
            if entry.frame.in_use():
                self._orphans.append((entry.frame, entry.reservation))
                return
            self._arena.free(entry.frame)
            entry.reservation.free()

    def _collect_orphans(self) -> None:
        alive, gone = [], []
        for orphan in self._orphans:
            (alive if orphan[0].in_use() else gone).append(orphan)
        if not gone:
            return
        with uninterrupted():
            for frame, reservation in gone:
                self._arena.free(frame)
                reservation.free()
            self._orphans = alive

    def _trim(self, nbytes: int, *, in_heap: bool = False) -> None:
        """Give back free frames and free heap that would push real memory above the limit."""
        idle = self._arena.held_bytes - self._heap.framed_bytes
        left = self._budget.available_bytes - nbytes
        if idle > left:
            idle -= self._arena.trim(idle - left)
        if idle + self._heap.kept_bytes(nbytes if in_heap else 0) <= left:
            return
        coming = nbytes - self._heap.kept_bytes() if in_heap else nbytes
        excess = self._heap.excess_bytes(max(0, coming))
        if excess > 0 and idle > 0:
            excess -= self._arena.trim(excess)
        if excess > 0:
            self._heap.give_back()
