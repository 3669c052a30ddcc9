"""A run in virtual time, by the policies that decide in a run.

[Note: what is real] The budget, the pool of weights with its choice of victims, the prediction of
the order, reading ahead, and the queue of updates are the objects that train. Theirs are the
decisions; drives, link, device and updates take the time that the machine's rates say. What is
written here is the order of calls of the thread that trains, as `Attached` and `Steps` have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from mt_lightning.engine.ahead import read_ahead
from mt_lightning.engine.build import Build
from mt_lightning.engine.importing import file_sizes
from mt_lightning.engine.units import Unit
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.pager.budget import Budget
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pager.predictor import BACKWARD, FORWARD
from mt_lightning.pager.read_ahead import ReadAhead
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.planning.on_device import stays_there
from mt_lightning.planning.planner import Answer
from mt_lightning.planning.tiers import lay_out
from mt_lightning.planning.timing import COMPUTE
from mt_lightning.planning.virtual import (
    DOWN,
    READ,
    UP,
    WRITE,
    VirtualArena,
    VirtualClock,
    VirtualExecutor,
    VirtualLink,
    VirtualTicket,
)
from mt_lightning.planning.virtual_drives import VirtualIO, VirtualStore
from mt_lightning.planning.virtual_units import VirtualUnits
from mt_lightning.planning.virtual_updates import MOST_PIECES, VirtualUpdates
from mt_lightning.tiers.ledger import Ledger
from mt_lightning.tiers.watch import Watch


@dataclass(frozen=True)
class Simulated:
    """What a step took, averaged over those that were timed.

    Attributes:
        step_s: Seconds.
        busy_s: Seconds that each part of the machine worked in a step.
        stall_s: Seconds that computing waited, by what for: "read", "update", "memory".
        drive_bytes: Read from each drive, and written to it.
        ram_peak_bytes: Most that was reserved.
        spans: Part, name, begin and end of all that was done, where asked for.
    """

    step_s: float
    busy_s: dict[str, float]
    stall_s: dict[str, float]
    drive_bytes: tuple[tuple[float, float], ...]
    ram_peak_bytes: int
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    @property
    def read_bytes(self) -> float:
        """Read from all drives."""
        return sum(read for read, _ in self.drive_bytes)

    @property
    def written_bytes(self) -> float:
        """Written to all drives."""
        return sum(written for _, written in self.drive_bytes)

    @property
    def compute_share(self) -> float:
        """Share of the time in which the device computes."""
        return self.busy_s.get(COMPUTE, 0.0) / self.step_s


def simulate(
    found: Answer,
    *,
    num_steps: int = 3,
    num_warm: int = 2,
    overlaps: bool = True,
    records: bool = False,
) -> Simulated:
    """Play steps of a run that fits.

    Args:
        found: The answer; its plan is the one that is played.
        num_steps: Steps that are timed.
        num_warm: Steps before them: in the first the order is not known yet.
        overlaps: Whether pages are read ahead and updates go on behind; for comparison.
        records: Whether to keep what was done when.
    """
    run = _Run(found, overlaps)
    for _ in range(num_warm):
        run.step()
    before = run.mark()
    run.clock.records = records
    for _ in range(num_steps):
        run.step()
    after = run.mark()
    delta = {name: (after[name] - before.get(name, 0.0)) / num_steps for name in after}
    moved = [delta.pop(f"{way}_bytes_{drive}") for drive, way in run.lanes]
    stalls = {name: delta.pop(f"stall_{name}_s") for name in ("read", "update", "memory")}
    return Simulated(
        delta.pop("now"),
        delta,
        stalls,
        tuple(zip(moved[::2], moved[1::2], strict=True)),
        run.budget.peak_bytes,
        run.clock.spans,
    )


class _Run:
    """The thread that trains."""

    def __init__(self, found: Answer, overlaps: bool) -> None:
        assert found.plan is not None
        assert found.work is not None
        assert found.tiers is not None
        self.found, self.plan, self.work = found, found.plan, found.work
        self.machine, self.training = found.machine, found.training
        # Pages keep which slot is current: the answer's stay as they are.
        self.build: Build = lay_out(found.model, found.training)
        self.overlaps = overlaps
        self.clock = VirtualClock()
        largest = max((page.layout.nbytes for page in self.build.table), default=1)
        self.store = VirtualStore(self.machine)
        self._place_files()
        block_bytes = max(BLOCK_BYTES, largest // MOST_PIECES)
        self.io = VirtualIO(self.clock, self.machine, self.store, block_bytes)
        self.budget, self.stats = Budget(self.plan.ram_limit_bytes), Stats()
        executor = VirtualExecutor(self.clock)
        self.worker = UpdateWorker(Watch(), Ledger(self.clock), executor)
        self.pool = WeightPool(
            cast("Any", VirtualArena()), self.budget, cast("Any", self.store),
            cast("Any", self.io), self.stats,
        )  # fmt: skip
        self.ahead = ReadAhead(
            [unit.pages for unit in self.build.units],
            [page.layout.nbytes for page in self.build.table],
            self.build.resident,
            self.plan.ram_limit_bytes,
            None if overlaps else 0,
        )
        self.pool.next_use, self.pool.judge = self.ahead.next_use, self.ahead.judge
        self.pool.eager_bytes = self.ahead.largest_bytes
        self.pool.relieve = self._relieve
        self.stalls = {"read": 0.0, "update": 0.0, "memory": 0.0}
        device = self.machine.device
        self.up = VirtualLink(self.clock, UP, device.up_bytes_per_s)
        self.down = VirtualLink(self.clock, DOWN, device.down_bytes_per_s)
        self.uploads: dict[int, VirtualTicket] = {}
        kept = self.plan.weight_bytes * stays_there(self.plan)
        self.staying = self._staying(kept or found.tiers.staying_bytes)
        self.there = stays_there(self.plan)
        self.on_device: set[int] = set()
        self.groups = found.tiers.inputs.of_step(self.training.accumulate_grad_batches)
        self.updates = VirtualUpdates(
            self.clock, self.io, self.worker, self.pool, self.plan, self.training, self.machine,
            overlaps=overlaps,
        )  # fmt: skip
        self.due, self.grads = self.updates.due, self.updates.grads
        self.eager = False
        """Whether the backward that runs hands its gradients to updates."""
        self.begun = False
        """Whether a step's commit waits for the next backward."""
        self.units = VirtualUnits(
            self.clock, self.io, self.pool, self.plan, self.build, self.work, self.training,
            self.machine, inputs=found.tiers.inputs, kept=found.tiers.kept_graphs, up=self.up,
            down=self.down,
        )  # fmt: skip
        self._fixed()

    def _fixed(self) -> None:
        plan = self.plan
        self.budget.reserve(
            plan.num_ring * plan.ring_bytes
            + plan.streams_bytes
            + plan.num_staging * plan.staging_bytes
            + plan.num_through * plan.through_bytes,
            "state",
        )
        for page, chunk in self.plan.cached_state:
            layout = self.build.table[page].state_layout
            self.budget.reserve(layout.chunks[chunk].nbytes, "state")
        for index in self.build.resident:
            self.budget.reserve(2 * self.build.table[index].layout.grad_bytes, "gradients")
        for page in self.build.table:
            page.weight.slot, page.weight.sums, page.weight.committed = 0, [[]], 0
        for index in self.build.resident:
            self.pool.pin(self.build.table[index]).wait()

    def _place_files(self) -> None:
        """Give files their places in the order that a run makes them in."""
        for name, nbytes in file_sizes(self.build.table, self.plan).items():
            self.store.create(name, nbytes)

    @property
    def lanes(self) -> list[tuple[int, str]]:
        """Each drive in each direction."""
        return [(n, way) for n in range(len(self.machine.drives)) for way in (READ, WRITE)]

    def _staying(self, room: int) -> set[int]:
        """Return the units whose weights stay on the device: those that backward needs first."""
        staying = set()
        for unit in reversed(self.build.units):
            room -= sum(self.build.table[index].layout.nbytes for index in unit.pages)
            if room < 0:
                break
            staying.add(unit.index)
        return staying

    def mark(self) -> dict[str, float]:
        """Return all counters."""
        return {
            "now": self.clock.now,
            **self.clock.busy_s,
            **{f"{way}_bytes_{drive}": self.io.bytes[drive, way] for drive, way in self.lanes},
            "stall_read_s": self.stalls["read"],
            "stall_update_s": self.stalls["update"],
            "stall_memory_s": self.stalls["memory"],
        }

    @contextmanager
    def _stalling(self, what: str) -> Iterator[None]:
        begin = self.clock.now
        yield
        self.stalls[what] += self.clock.now - begin

    def _relieve(self) -> bool:
        with self._stalling("memory"):
            return self.updates.relieve()

    # -- a step -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Play one step."""
        waits = self.plan.schedule == "deferred"
        for sweep, times in enumerate(self.groups):
            self.units.times, last = times, sweep == len(self.groups) - 1
            with self.units.summing():
                self._forward()
                self._backward(eager=last and not waits)
        if waits:
            self._clip()
            for unit in self.build.units:
                self.due.update(dict.fromkeys(unit.pages))
            for page in self.build.table:
                if page.layout.optimizer is None:
                    self.due.pop(page.index, None)
        self.worker.drain_commits()
        with self._stalling("update"):
            for index in self.build.resident:
                self.updates.update_now(self.build.table[index])
        if waits:
            self.begun = True
        else:
            self._commit()
        if not self.there:
            self.on_device.clear()  # updated on the host, or about to be
        self.uploads.clear()
        self.ahead.predictor.end_of_step()

    def _commit(self) -> None:
        self.begun = False
        self.worker.submit(lambda: None, None, lambda: None)

    def _clip(self) -> None:
        """As `Steps.clip_norm`: what is in RAM is measured by the thread that trains."""
        if not self.training.clips_norm:
            return
        with self._stalling("update"):
            self.worker.drain()
        held = sum(self.build.table[index].layout.waiting_bytes for index in self.grads)
        self.units.spend("norms", held / self.machine.ram_bytes_per_s)

    def _forward(self) -> None:
        for index, unit in enumerate(self.build.units):
            self._enter(unit, backward=False)
            self.units.forward(index)
            self._leave(unit)
        self.units.outside(backward=False)

    def _backward(self, *, eager: bool) -> None:
        self.eager = eager
        self.units.outside(backward=True)
        for index in list(self.due):
            self.updates.update(self.build.table[index])
        if self.begun:
            self._commit()
        before: Unit | None = None
        for index in reversed(range(len(self.build.units))):
            unit = self.build.units[index]
            if before is not None:
                self._end(before, eager)
            adds = any(page in self.grads for page in unit.pages)
            self._enter(unit, backward=True)
            self.units.backward(index, adds=adds)
            before = unit
        assert before is not None
        self._end(before, eager)

    def _end(self, unit: Unit, eager: bool) -> None:
        """Let go of a unit after its backward, and hand its gradients on."""
        self._leave(unit)
        self.units.end(unit.index)
        for index in unit.pages:
            page = self.build.table[index]
            if page.layout.optimizer is None or page.layout.units[0] != unit.name:
                continue
            self.updates.complete(page)
            if not (self.machine.on_host or self.there):
                name = f"gradients of {unit.name}"
                self.updates.landed[index] = self.down.move(page.layout.waiting_bytes, name)
            if eager:
                self.updates.update(page)
            elif index in self.updates.spilled:
                self.updates.spill(page)

    def _enter(self, unit: Unit, *, backward: bool) -> None:
        table = self.build.table
        self.ahead.observe(unit.index, BACKWARD if backward else FORWARD)
        pages = [table[index] for index in unit.pages]
        if backward and self.eager:
            self.updates.coming(pages)
        with self._stalling("update"):
            for page in pages:
                if page.index in self.due:
                    self.updates.update(page)
                self.worker.retire_page(page.index)
        entries = [self.pool.pin(page) for page in pages]
        if backward and not self.there:
            for page in pages:
                self.updates.expect(page)
        if any(entry.read is not None and not entry.read.done() for entry in entries):
            self.ahead.stalled()
        with self._stalling("read"):
            for entry in entries:
                entry.wait()
            self._uploaded(unit, entries).wait()
        self._prepare()

    def _uploaded(self, unit: Unit, entries: list[PoolEntry]) -> VirtualTicket:
        """Return the upload of a unit's weights, begun now where it was not begun before."""
        ticket = self.uploads.pop(unit.index, None)
        if ticket is None:
            there = self.machine.on_host or unit.index in self.on_device
            nbytes = 0 if there else sum(entry.page.layout.nbytes for entry in entries)
            if unit.index in self.staying:
                self.on_device.add(unit.index)
            ticket = self.up.move(nbytes, f"weights of {unit.name}")
        return ticket

    def _prepare(self) -> None:
        """As `engine.ahead.prepare`; on an accelerator, begin to upload the unit after this one."""
        if not self.overlaps:
            return
        self._upload_next(
            read_ahead(self.ahead, self.build.table, self.pool, self.updates.ahead_of_use)
        )

    def _upload_next(self, kept: list[PoolEntry]) -> None:
        if self.machine.on_host or not kept:
            return
        unit = next(u for u in self.build.units if kept[0].index in u.pages)
        ready = [e for e in kept if e.index in unit.pages and (e.read is None or e.read.done())]
        pending = any(self.worker.is_pending(i) or i in self.due for i in unit.pages)
        if unit.index not in self.uploads and len(ready) == len(unit.pages) and not pending:
            self.uploads[unit.index] = self._uploaded(unit, ready)

    def _leave(self, unit: Unit) -> None:
        for index in unit.pages:
            entry = self.pool.entry(self.build.table[index])
            assert entry is not None
            self.pool.release(entry)
