"""Updates and spills in virtual time: the jobs of the update worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from mt_lightning.engine.ending import Ending
from mt_lightning.engine.needs import spill_bytes
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.spill import Ring
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pages.table import Page
from mt_lightning.planning.machines import Machine
from mt_lightning.planning.on_device import seconds_there, stays_there
from mt_lightning.planning.tiers import runs_layer_major
from mt_lightning.planning.timing import COMPUTE, UPDATE, update_seconds
from mt_lightning.planning.training import Training
from mt_lightning.planning.virtual import (
    READ,
    WRITE,
    VirtualClock,
    VirtualFrame,
    VirtualTicket,
)
from mt_lightning.planning.virtual_drives import VirtualIO

_CODED_SHARE = 27 / 32
_SUM_MOVES, _SPILL_MOVES, _CLIP_MOVES = 3, 5, 2
"""Bytes moved through memory for each of a gradient: to add what is on disk; to clear a frame, copy
into it, and take norms and finiteness; to scale it."""
MOST_PIECES = 64
"""Chunks of a page that are told apart; more of them are moved together."""


class VirtualUpdates:
    """Submits updates to the worker, and plays them.

    Args:
        clock: The clock.
        io: The drives.
        worker: The queue of jobs.
        pool: The weights in RAM.
        plan: What stays in RAM.
        training: The settings.
        machine: The rates.
        overlaps: Whether the thread that trains goes on meanwhile.

    Attributes:
        due: Pages whose update waits for their next forward.
        grads: Memory of the gradients of each page.
        landed: Their way from the device.
    """

    def __init__(
        self,
        clock: VirtualClock,
        io: VirtualIO,
        worker: UpdateWorker,
        pool: WeightPool,
        plan: Plan,
        training: Training,
        machine: Machine,
        *,
        overlaps: bool,
    ) -> None:
        self._clock, self._io, self._worker, self._pool = clock, io, worker, pool
        self._plan, self._training, self._machine = plan, training, machine
        self._overlaps = overlaps
        self._cached = set(plan.cached_state)
        self._lazy = plan.durability == "checkpoint"
        self._on_disk: set[int] = set()
        self._stepped: set[int] = set()
        num_frames = plan.num_streams or max(1, plan.num_ring)
        self._ring = Ring(cast("Any", [VirtualFrame(0) for _ in range(num_frames)]))
        self.due: dict[int, None] = {}
        self.grads: dict[int, Reservation] = {}
        self.spilled = set(plan.spilled)
        """Pages whose gradients go to disk where they have to wait."""
        self._pages: dict[int, Page] = {}
        self._added: dict[int, list[Reservation]] = {}
        """Gradients of one more batch, until they are added to those that are held."""
        self._sums = runs_layer_major(plan)
        self.landed: dict[int, VirtualTicket] = {}
        self._coming: Page | None = None
        self._preloaded: tuple[Page, Any, VirtualTicket] | None = None

    def expect(self, page: Page) -> None:
        """As `Gradients.expect`: make room for what autograd is about to make.

        In the usual order it lies beside what is held until it is added; unit by unit gradients go
        into one sum, parameter by parameter.
        """
        layout, held = page.layout, page.index in self.grads
        if layout.optimizer is None or (held and self._sums):
            return
        # What leaves a device is rounded there.
        nbytes = layout.grad_bytes if self._machine.on_host else layout.waiting_bytes
        room = self._pool.reserve(nbytes, "gradients", f"gradients of {layout.key}")
        if held:
            self._added.setdefault(page.index, []).append(room)
        else:
            self.grads[page.index], self._pages[page.index] = room, page

    def complete(self, page: Page) -> None:
        """As `Gradients.complete`: what has arrived is one with what was held."""
        for room in self._added.pop(page.index, ()):
            room.free()
        if page.index in self.grads:
            self.grads[page.index].shrink(page.layout.waiting_bytes)

    def relieve(self) -> bool:
        """As `Steps.relieve`: wait for the oldest update, else send what waits to disk."""
        if self._worker.retire_oldest():
            return True
        for index in self.grads:
            page = self._pages[index]
            entry = self._pool.entry(page)
            if entry is None or not entry.pins:
                self.complete(page)
                self.spilled.add(index)
                self.spill(page)
                return True
        return False

    def coming(self, pages: Sequence[Page]) -> None:
        """As `Steps.submit_ready`: the state of pages that backward enters begins to be read."""
        for page in pages:
            if page.layout.optimizer is not None and len(page.layout.units) == 1:
                self._coming = page
                self._worker.hint(self._preload)

    def _preload(self) -> None:
        page = self._coming
        reads_ahead = max(self._plan.num_ring, self._plan.num_streams) > 2
        if page is None or page.index not in self._stepped or not reads_ahead:
            return
        if self._preloaded is not None:
            return
        frame = self._ring.acquire(wait=False)
        if frame is not None:
            self._coming = None
            read = self._io.move(READ, self._pieces(page)[0][0], page.state.file)
            self._preloaded = page, frame, read

    def _take_preloaded(self, page: Page) -> tuple[Any, VirtualTicket] | None:
        if self._coming is page:
            self._coming = None
        if self._preloaded is None or self._preloaded[0] is not page:
            return None
        _, frame, read = self._preloaded
        self._preloaded = None
        return frame, read

    def ahead_of_use(self, page: Page) -> None:
        """As `Steps.ahead_of_use`: begin an update early if its weights are had without a wait."""
        due = page.index in self.due and self._worker.has_room and not stays_there(self._plan)
        entry = self._pool.prefetch(page) if due else None
        if entry is not None:
            self._pool.release(entry)
            self.update(page)

    def update(self, page: Page) -> None:
        """Submit the update of a page."""
        self.due.pop(page.index, None)
        if stays_there(self._plan):
            name = f"update of {page.layout.key}"
            self._clock.spend(COMPUTE, name, seconds_there(page, self._machine))
            return
        self._worker.retire_page(page.index)
        entry = self._pool.pin(page)
        self._submit(page, lambda: self._run_update(page, entry), entry)

    def update_now(self, page: Page) -> None:
        """As `Steps` with a page that always stays: by the thread that trains."""
        if page.layout.optimizer is None:
            return
        if stays_there(self._plan):
            self.update(page)
            return
        seconds = update_seconds(page, self._training, self._machine)
        self._clock.spend(UPDATE, f"update of {page.layout.key}", seconds)
        moved = [(page.state, 0 if self._lazy else page.state.nbytes)]
        moved.append((page.weight, 0 if self._plan.keeps_weights else page.weight.nbytes))
        written = []
        for plane, nbytes in moved:
            slot = plane.next_slot
            written.append(self._io.move(WRITE, nbytes, f"{plane.key}.{slot}"))
            plane.advance(slot, [[]])
            plane.commit()
        for ticket in written:
            ticket.wait()

    def spill(self, page: Page) -> None:
        """Submit the way of a page's gradient to disk."""
        again = page.index in self._on_disk
        self._on_disk.add(page.index)

        pieces = self._pieces(page)

        def run() -> None:
            # One range after the other, as `Spiller` moves them through its frame.
            part = spill_bytes(page) / len(pieces)
            for channel in (READ, WRITE) if again else (WRITE,):
                for _ in pieces:
                    self._io.move(channel, part, _spilled(page)).wait()
            moves = _SUM_MOVES * again + _SPILL_MOVES
            self._clock.spend(UPDATE, "spill", moves * self._ram_seconds(page))

        self._submit(page, run, None)

    def _submit(
        self, page: Page, run: Callable[[], Ending | None], entry: PoolEntry | None
    ) -> None:
        grads = self.grads.pop(page.index, None)
        landed = self.landed.pop(page.index, None)

        def whole() -> Ending | None:
            if landed is not None:
                landed.wait()
            return run()

        def retire() -> None:
            if grads is not None:
                grads.free()
            if entry is not None:
                self._pool.release(entry)

        self._worker.submit(whole, page.index, retire)
        if not self._overlaps:
            self._worker.retire_page(page.index)

    def _run_update(self, page: Page, entry: PoolEntry) -> Ending:
        """As `Updater.update`: the next chunk is read while this one is stepped."""
        entry.wait()
        pieces, slot = self._pieces(page), page.state.next_slot
        weights = f"{page.weight.key}.{page.weight.next_slot}"
        # As `Updater`: weights are written behind the steps where chunks are ranges of them.
        in_order = page.state_layout.sliced and not page.state_layout.formats
        current = f"{page.state.key}.{page.state.slot or 0}"
        reads = [read for read, _ in pieces] if page.index in self._stepped else [0.0] * len(pieces)
        staged = spill_bytes(page) / len(pieces) if page.index in self._on_disk else 0.0
        self._on_disk.discard(page.index)
        self._stepped.add(page.index)
        seconds = update_seconds(page, self._training, self._machine) / len(pieces)
        if self._training.clips_norm:
            seconds += _CLIP_MOVES * self._ram_seconds(page) / len(pieces)
        ahead = self._take_preloaded(page)
        written = []
        for number, (_, write) in enumerate(pieces):
            if ahead is None:
                ahead = self._ring.acquire(wait=True), self._io.move(READ, reads[number], current)
            (frame, ticket), ahead = ahead, None
            if number + 1 < len(pieces):
                frame_ahead = self._ring.acquire(wait=False)
                if frame_ahead is not None:
                    ahead = frame_ahead, self._io.move(READ, reads[number + 1], current)
            ticket.wait()
            if staged:  # there is one frame for spilled gradients: they are read when needed
                self._io.move(READ, staged, _spilled(page)).wait()
            self._clock.spend(UPDATE, f"update of {page.layout.key}", seconds)
            written.append(self._io.move(WRITE, write, f"{page.state.key}.{slot}"))
            self._ring.release(cast("Any", frame), cast("Any", written[-1]))
            if not self._plan.keeps_weights and in_order:
                part = page.layout.nbytes / len(pieces)
                written.append(self._io.move(WRITE, part, weights))
        self._preload()
        if not self._plan.keeps_weights and not in_order:
            written.append(self._io.move(WRITE, page.layout.nbytes, weights))

        def end() -> None:
            page.state.advance(slot, [[]])
            page.state.commit()
            if self._plan.keeps_weights:
                entry.dirty = True
            else:
                page.weight.advance(page.weight.next_slot, [[]])
                page.weight.commit()

        return Ending(written, end)

    def _ram_seconds(self, page: Page) -> float:
        return page.layout.grad_bytes / self._machine.ram_bytes_per_s

    def _pieces(self, page: Page) -> list[tuple[float, float]]:
        """Return the bytes of state read and written for each run of chunks."""
        chunks = page.state_layout.chunks
        share = _CODED_SHARE if page.state_layout.slots else 1.0
        size = -(-len(chunks) // MOST_PIECES) or 1
        pieces = []
        for start in range(0, len(chunks), size):
            read = written = 0.0
            for chunk in chunks[start : start + size]:
                cached = (page.index, chunk.index) in self._cached
                read += share * chunk.nbytes * (not cached)
                written += share * chunk.nbytes * (not (cached and self._lazy))
            pieces.append((read, written))
        return pieces or [(0.0, 0.0)]


def _spilled(page: Page) -> str:
    """Return the file of a page's gradient, as `Spiller` names it."""
    return f"{page.layout.key}.grad.0"
