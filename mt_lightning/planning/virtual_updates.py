"""Updates and spills in virtual time: the jobs of the update worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mt_lightning.engine.plan import Plan
from mt_lightning.engine.spill import Ring
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pages.table import Page
from mt_lightning.planning.machines import Machine
from mt_lightning.planning.timing import UPDATE, update_seconds
from mt_lightning.planning.training import Training
from mt_lightning.planning.virtual import (
    READ,
    WRITE,
    VirtualClock,
    VirtualFrame,
    VirtualIO,
    VirtualTicket,
)

_CODED_SHARE = 27 / 32
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
        # A coded chunk passes through one frame while it is read, and another while it is written.
        num_frames = plan.num_streams - 1 if plan.num_streams else max(1, plan.num_ring)
        self._ring = Ring(cast("Any", [VirtualFrame(0) for _ in range(num_frames)]))
        self.due: dict[int, None] = {}
        self.grads: dict[int, Reservation] = {}
        self.landed: dict[int, VirtualTicket] = {}

    def update(self, page: Page) -> None:
        """Submit the update of a page."""
        self.due.pop(page.index, None)
        self._worker.retire_page(page.index)
        entry = self._pool.pin(page)
        self._submit(page, lambda: self._run_update(page, entry), entry)

    def spill(self, page: Page) -> None:
        """Submit the way of a page's gradient to disk."""
        again = page.index in self._on_disk
        self._on_disk.add(page.index)

        def run() -> None:
            if again:
                self._io.move(READ, page.layout.nbytes, "gradients").wait()
            self._io.move(WRITE, page.layout.nbytes, "gradients").wait()

        self._submit(page, run, None)

    def _submit(self, page: Page, run: Callable[[], None], entry: PoolEntry | None) -> None:
        grads = self.grads.pop(page.index, None)
        landed = self.landed.pop(page.index, None)

        def whole() -> None:
            if landed is not None:
                landed.wait()
            run()

        def retire() -> None:
            if grads is not None:
                grads.free()
            if entry is not None:
                self._pool.release(entry)

        self._worker.submit(whole, page.index, retire)
        if not self._overlaps:
            self._worker.retire_page(page.index)

    def _run_update(self, page: Page, entry: PoolEntry) -> None:
        """As `Updater.update`: the next chunk is read while this one is stepped."""
        entry.wait()
        pieces = self._pieces(page)
        reads = [read for read, _ in pieces] if page.index in self._stepped else [0.0] * len(pieces)
        staged = page.layout.nbytes / len(pieces) if page.index in self._on_disk else 0.0
        self._on_disk.discard(page.index)
        self._stepped.add(page.index)
        seconds = update_seconds(page, self._training, self._machine) / len(pieces)
        ahead: tuple[Any, VirtualTicket] | None = None
        written = []
        for number, (_, write) in enumerate(pieces):
            frame, ticket = ahead or self._load(reads[number], wait=True)
            ahead = None
            if number + 1 < len(pieces):
                frame_ahead = self._ring.acquire(wait=False)
                if frame_ahead is not None:
                    ahead = frame_ahead, self._io.move(READ, reads[number + 1], page.state.key)
            ticket.wait()
            if staged:  # there is one frame for spilled gradients: they are read when needed
                self._io.move(READ, staged, "gradients").wait()
            self._clock.spend(UPDATE, f"update of {page.layout.key}", seconds)
            written.append(self._io.move(WRITE, write, page.state.key))
            self._ring.release(frame, cast("Any", written[-1]))
            if not self._plan.keeps_weights:
                part = page.layout.nbytes / len(pieces)
                written.append(self._io.move(WRITE, part, page.weight.key))
        if self._plan.keeps_weights:
            entry.dirty = True
        for ticket in written:
            ticket.wait()

    def _load(self, nbytes: float, *, wait: bool) -> tuple[Any, VirtualTicket]:
        frame = self._ring.acquire(wait=wait)
        return frame, self._io.move(READ, nbytes, "state")

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
