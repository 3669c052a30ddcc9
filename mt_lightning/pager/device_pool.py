"""Weight planes in device memory: a cache of pages, filled ahead of their use.

[Note: the device's copy is clean] Only the update changes weights, and it does so on the host,
unless all of a run fits the device: see `home`. A plane on the device can be dropped at no cost
then, and is brought anew once its page has changed. What
has not changed (between the batches of a step, in evaluation, frozen layers) stays and is not
brought again as long as there is room; with room for the whole model each page is brought once per
update.

[Note: decisions on the device] As in `pool`, what is brought and dropped follows from sizes and the
order of use alone, never from how far a copy has got. The frame on the host stays pinned until the
copy has been waited for, or memory is short.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable

import torch

from mt_lightning.errors import BudgetError
from mt_lightning.pager.budget import Budget, Reservation
from mt_lightning.pager.device_entry import DeviceEntry
from mt_lightning.pager.entry import drop_idle
from mt_lightning.pager.planes import Planes
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pager.replacement import NextUse, choose, choose_ahead, nothing_known
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page
from mt_lightning.tiers.device_arena import DeviceArena
from mt_lightning.tiers.ledger import MEMORY
from mt_lightning.tiers.link import Link
from mt_lightning.tiers.spans import Span


class DevicePool(Planes):
    """The planes of all pages whose weights are on the device, under one budget.

    Args:
        link: The way there.
        pool: The frames on the host.
        budget: That of the device.
        stats: Counters to keep.
        ahead_bytes: How far ahead pages are brought.
    """

    def __init__(
        self, link: Link, pool: WeightPool, budget: Budget, stats: Stats, ahead_bytes: int
    ) -> None:
        self._link = link
        self._arena = DeviceArena(link.frame)
        self._pool = pool
        self.budget = budget
        self._stats = stats
        self.ahead_bytes = ahead_bytes
        self.next_use: NextUse = nothing_known
        """When pages are expected to be needed."""
        self.give_back: Callable[[], bool] = lambda: False
        """Frees device memory that is used for something else; False where nothing can be."""
        self.await_update: Callable[[Page], Callable[[], object] | None] = lambda page: None
        """Returns what waits for the update of a page that is under way, None where none is."""
        self._entries: OrderedDict[int, DeviceEntry] = OrderedDict()
        self._orphans: list[DeviceEntry] = []
        self._kept: dict[int, tuple[DeviceEntry, PoolEntry]] = {}
        self._held_bytes = 0

    # -- use --------------------------------------------------------------------------------------
    def bring(self, page: Page, source: PoolEntry) -> None:
        """Pin the plane of `page`, beginning to copy it where it is absent or old.

        Raises:
            BudgetError: Everything else on the device is in use and the page does not fit.
        """
        entry = self._current(page)
        if entry is None:
            self.make_room(page.layout.nbytes, f"the weights of page {page.layout.key}")
            entry = self._begin(page, source)
        self._entries.move_to_end(page.index)
        entry.pins += 1

    def plane(self, page: Page) -> torch.Tensor:
        """Let compute wait for the copy and return the plane."""
        entry = self._entries[page.index]
        self._settle(entry)
        return entry.frame.tensor

    def release(self, page: Page) -> None:
        """End one pin; the last one marks how far compute has to get before the frame is free."""
        entry = self._entries[page.index]
        assert entry.pins > 0
        entry.pins -= 1
        if entry.idle:
            self._settle(entry)
            self._link.mark(entry.frame)
        if entry.stale and not entry.pins:
            self._drop(entry)

    def holds(self, page: Page) -> bool:
        """Return whether the plane is there, or on its way."""
        entry = self._entries.get(page.index)
        return entry is not None and (bool(entry.pins) or entry.is_of(page.version))

    def prefetch(self, page: Page) -> bool:
        """Begin to bring a page if that takes nothing from anyone who needs it sooner."""
        if page.index in self._kept or self._is_coming(page):
            return True
        nbytes = page.layout.nbytes
        if self._pool.entry(page) is None:
            return False
        old = self._entries.get(page.index)
        if old is not None:
            if not old.idle:
                return True
            self._drop(old)
        self._collect_orphans()
        victims = choose_ahead(
            self._entries.values(), self.next_use, page.index, nbytes - self.budget.available_bytes
        )
        source = self._pool.prefetch(page) if victims is not None else None
        if victims is None or source is None:
            return False
        for victim in victims:
            self._drop(victim)
        self._begin(page, source, self.await_update(page))
        self._pool.release(source)
        self._stats.uploads_ahead += 1
        return True

    def _is_coming(self, page: Page) -> bool:
        """Return whether the plane on the device is the one that its next use needs."""
        entry = self._entries.get(page.index)
        return entry is not None and not entry.stale

    def _current(self, page: Page) -> DeviceEntry | None:
        """Return the entry of a page that is bound, or has not changed since it was brought."""
        entry = self._entries.get(page.index)
        if entry is None or entry.pins or entry.is_of(page.version):
            return entry
        self._drop(entry)
        return None

    def _begin(
        self, page: Page, source: PoolEntry, after: Callable[[], object] | None = None
    ) -> DeviceEntry:
        nbytes = page.layout.nbytes
        if not self._arena.has_free(nbytes):
            self._trim(nbytes)
        reservation = self.budget.reserve(nbytes, "weights")
        entry = DeviceEntry(page, self._arena.alloc(nbytes), reservation)
        self._held_bytes += nbytes
        self._entries[page.index] = entry
        entry.behind_update = after is not None
        self._upload(entry, source, after)
        return entry

    def _upload(
        self, entry: DeviceEntry, source: PoolEntry, after: Callable[[], object] | None = None
    ) -> None:
        read = source.read

        def ready() -> None:
            if read is not None:
                read.wait()
            if after is not None:
                after()

        wait = ready if read is not None or after is not None else None
        entry.upload = self._link.upload(source.frame.tensor, entry.frame, wait)
        entry.source = source
        source.pins += 1
        self._stats.bytes_uploaded += entry.nbytes
        self._stats.vram_peak_bytes = self.budget.peak_bytes

    def _settle(self, entry: DeviceEntry) -> None:
        """Let compute wait for a copy, and let go of the frame it came from."""
        upload, entry.upload = entry.upload, None
        if upload is not None:
            self._link.wait(upload)
            self._let_go(entry)

    def _let_go(self, entry: DeviceEntry) -> None:
        if entry.source is not None:
            self._pool.release(entry.source)
            entry.source = None

    # -- change -----------------------------------------------------------------------------------
    def changes(self, page: Page) -> None:
        """Wait until no copy reads the page's frame; what was copied before is old."""
        if page.index in self._kept:
            self._bring_home(*self._kept[page.index])
            return
        entry = self._entries.get(page.index)
        if entry is None:
            return
        if entry.upload is not None:
            self._link.taken(entry.upload)
            self._let_go(entry)
        self._save(entry)
        entry.stale = True
        if not entry.pins:
            self._drop(entry)

    def keep(self, page: Page, source: PoolEntry) -> torch.Tensor:
        """Bring a page for good."""
        self.bring(page, source)
        self._kept[page.index] = self._entries[page.index], source
        return self.plane(page)

    def changed(self, page: Page) -> None:
        """Bring a page that is kept once more, over what compute has read until now."""
        if page.index in self._kept:
            entry, source = self._kept[page.index]
            self._link.mark(entry.frame)
            self._upload(entry, source)
            self._settle(entry)

    def _bring_home(self, entry: DeviceEntry, source: PoolEntry) -> None:
        """Copy to the host what user code has written to a page that is kept."""
        source.wait()
        source.dirty |= entry.dirty
        entry.dirty = False
        into = self.on_host(entry.frame.tensor)
        if not torch.equal(into, source.frame.tensor):
            source.frame.tensor.copy_(into)

    def on_host(self, plane: torch.Tensor) -> torch.Tensor:
        """Download a copy, and wait for it."""
        into = torch.empty_like(plane, device="cpu")
        # A copy: what was handed to the link is no longer ours.
        self._link.done(self._link.download(plane.clone(), into))
        return into

    # -- updates on the device --------------------------------------------------------------------
    def begin_update(self, page: Page) -> torch.Tensor:
        """Return the plane of a page that was brought, to be updated by compute."""
        entry = self._entries[page.index]
        self._settle(entry)
        if page.index not in self._kept and entry.frame.in_use():
            # Somebody still looks at the old weights.
            old = DeviceEntry(page, entry.frame, entry.reservation)
            reservation = self.reserve(page.layout.nbytes, "weights", f"page {page.layout.key}")
            entry.frame, entry.reservation = self._arena.alloc(page.layout.nbytes), reservation
            self._held_bytes += page.layout.nbytes
            entry.frame.tensor.copy_(old.frame.tensor)
            self._orphans.append(old)
        return entry.frame.tensor

    def end_update(self, page: Page) -> None:
        """Take note that compute has been given what makes the next version of a page."""
        self._entries[page.index].was_updated()

    def is_ahead(self, page: Page) -> bool:
        """Return whether the device alone has the last version of a page."""
        entry = self._entries.get(page.index)
        return entry is not None and entry.dirty

    def come_home(self) -> None:
        """Copy to the host what the device alone has."""
        ends = [self._begin_save(entry) for entry in self._entries.values() if entry.dirty]
        for end in ends:
            end()

    def forget_updates(self) -> None:
        """Distrust what the device alone has."""
        for entry in self._entries.values():
            entry.stale |= entry.dirty
            entry.dirty = False

    def _save(self, entry: DeviceEntry) -> None:
        if entry.dirty:
            self._begin_save(entry)()

    def _begin_save(self, entry: DeviceEntry) -> Callable[[], None]:
        """Begin to copy a plane to its frame on the host; return what waits for it."""
        page = entry.page
        source = self._pool.pin(page)
        source.wait()
        if page.index not in self._kept and source.frame.in_use():
            source = self._pool.copy_on_write(page)
        # A view, which the link leaves as it is.
        download = self._link.download(entry.frame.tensor.view(-1), source.frame.tensor)
        self._stats.bytes_returned += entry.nbytes

        def end() -> None:
            self._link.done(download)
            source.dirty, entry.dirty = True, False
            self._pool.release(source)

        return end

    # -- room -------------------------------------------------------------------------------------
    def make_room(self, nbytes: int, what: str) -> None:
        """Drop planes, then what else can go, until `nbytes` can be reserved.

        Raises:
            BudgetError: That many bytes cannot be had while what is in use stays.
        """
        self._collect_orphans()
        while self.budget.available_bytes < nbytes:
            victim = choose(self._entries.values(), self.next_use)
            if victim is not None:
                self._drop(victim)
                continue
            with Span("wait for device memory", what, MEMORY):
                given = self.give_back()
            self._collect_orphans()
            if given or self.budget.available_bytes >= nbytes:
                continue
            used = self.budget.describe()
            raise BudgetError(
                f"{what} need {nbytes} bytes of device memory, but only "
                f"{self.budget.available_bytes} of max_vram_gb="
                f"{self.budget.limit_bytes / 2**30:.3f} GiB are not in use ({used}). Raise "
                "max_vram_gb, or name smaller units with units=[...]."
            )

    def reserve(self, nbytes: int, purpose: str, what: str) -> Reservation:
        """Make room and reserve."""
        self.make_room(nbytes, what)
        self._trim(nbytes)
        reservation = self.budget.reserve(nbytes, purpose)
        self._stats.vram_peak_bytes = self.budget.peak_bytes
        return reservation

    def relieve(self) -> bool:
        """Wait for the oldest copy that holds a frame on the host."""
        for entry in self._entries.values():
            if entry.upload is not None and entry.source is not None:
                self._link.taken(entry.upload)
                self._let_go(entry)
                return True
        return False

    def can_reserve(self, nbytes: int) -> bool:
        """Drop planes that nobody uses until `nbytes` can be reserved; False where it cannot."""
        self._collect_orphans()
        return drop_idle(self._entries.values, self.next_use, self.budget, nbytes, self._drop)

    def reset(self) -> None:
        """End every use but that of pages that are kept."""
        for entry in list(self._entries.values()):
            if entry.index not in self._kept:
                entry.pins = 0
                self._drop(entry)

    def clear(self) -> None:
        """Forget every plane; one that somebody still looks at lives on until they are done."""
        self._kept.clear()
        self.forget_updates()
        self.reset()
        self._collect_orphans()
        self._arena.close()

    def _drop(self, entry: DeviceEntry) -> None:
        assert not entry.pins
        # Waited for, else its memory could be used for something else under the copy. Nobody wants
        # the bytes any more, so nobody minds that they could not be had.
        with contextlib.suppress(Exception):
            self._settle(entry)
        self._let_go(entry)
        self._save(entry)
        del self._entries[entry.index]
        if entry.frame.in_use():
            self._orphans.append(entry)
        else:
            self._free(entry)

    def _free(self, entry: DeviceEntry) -> None:
        self._held_bytes -= entry.nbytes
        self._link.retire(entry.frame)
        self._arena.free(entry.frame)
        entry.reservation.free()

    def _collect_orphans(self) -> None:
        alive = []
        for entry in self._orphans:
            if entry.frame.in_use():
                alive.append(entry)
            else:
                self._free(entry)
        self._orphans = alive

    def _trim(self, nbytes: int) -> None:
        """Give back free frames of other sizes that would push real memory above the limit."""
        idle_bytes = self._arena.held_bytes - self._held_bytes
        excess = idle_bytes + nbytes - self.budget.available_bytes
        if idle_bytes and excess > 0:
            self._arena.trim(excess)
