"""Units in virtual time: what the thread that trains computes, and what it does for the kit.

[Note: work beside the model's] Under a budget that does not hold everything, freed gradients go
back to the kernel, and the next ones are touched for the first time again: page by page, each
zeroed. Gradients of further micro-batches are added to those before them. Both are work of the
thread that trains, and on a CPU they are not small.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

from mt_lightning.engine.build import Build
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.window.sums import largest_param_bytes
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import WeightPool
from mt_lightning.planning.inputs import Inputs
from mt_lightning.planning.machines import Machine
from mt_lightning.planning.tiers import runs_layer_major
from mt_lightning.planning.timing import COMPUTE, fresh_seconds, summed_seconds
from mt_lightning.planning.training import Training
from mt_lightning.planning.virtual import (
    READ,
    WRITE,
    VirtualClock,
    VirtualLink,
    VirtualTicket,
)
from mt_lightning.planning.virtual_drives import VirtualIO
from mt_lightning.planning.work import ModelWork


class VirtualUnits:
    """Plays what units compute and receive.

    Args:
        clock: The clock.
        io: The drives.
        pool: Counts what inputs and graphs take.
        plan: What stays in RAM.
        build: The pages.
        work: What units compute.
        training: The settings.
        machine: The rates.
        inputs: What units receive, and where it waits.
        kept: Numbers of the units that need not run again in backward.
        up: To the device.
        down: From the device.

    Attributes:
        times: Micro-batches that a unit runs for while it is there.
    """

    def __init__(
        self,
        clock: VirtualClock,
        io: VirtualIO,
        pool: WeightPool,
        plan: Plan,
        build: Build,
        work: ModelWork,
        training: Training,
        machine: Machine,
        *,
        inputs: Inputs,
        kept: Set[int],
        up: VirtualLink,
        down: VirtualLink,
    ) -> None:
        self._clock, self._io, self._pool, self._plan = clock, io, pool, plan
        self._build, self._work, self._training, self._machine = build, work, training, machine
        self.times, self._kept, self._up, self._down = inputs.group, kept, up, down
        self._held: dict[int, list[Reservation]] = {}
        self._away = inputs.away
        self._on_device = plan.on_device is not None

    def spend(self, name: str, seconds: float) -> None:
        """Let the thread that trains compute."""
        self._clock.spend(COMPUTE, name, seconds)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """As `Window.run`: beside a sum there is room for the gradient of one parameter."""
        if not runs_layer_major(self._plan):
            yield
            return
        nbytes = largest_param_bytes(self._build.table)
        beside = self._pool.reserve(nbytes, "gradients", "the gradient of a parameter")
        yield
        beside.free()

    def forward(self, index: int) -> None:
        """Play forward, and take what backward will need."""
        work, name = self._work.units[index], self._build.units[index].name
        seconds = work.seconds(self._machine.device, self._training.dtype)
        self.spend(f"forward of {name}", self.times * (seconds + self._machine.unit_s))
        nbytes = self.times * work.input_bytes
        held = self._held.setdefault(index, [])
        away = index in self._away
        if self._on_device and away and nbytes:
            self._down.move(nbytes, "inputs")
        if away and not self._on_device:
            self._move_inputs(WRITE, index)
        elif nbytes and away == self._on_device:
            held.append(self._pool.reserve(nbytes, "inputs", "the inputs of units"))
        if index in self._kept and self._machine.on_host and work.saved_bytes:
            saved = self.times * work.saved_bytes
            held.append(self._pool.reserve(saved, "graphs", "graphs"))

    def backward(self, index: int, *, adds: bool) -> None:
        """Play backward.

        Args:
            index: Number of the unit.
            adds: Whether gradients of earlier micro-batches are there to be added to.
        """
        work, unit = self._work.units[index], self._build.units[index]
        device, dtype = self._machine.device, self._training.dtype
        nbytes = self.times * work.input_bytes
        reads = []
        away = index in self._away
        if away and not self._on_device:
            # Those of further micro-batches are read while the first ones compute.
            reads = self._move_inputs(READ, index)
            reads[0].wait()
        if self._on_device and away and nbytes:
            self._up.move(nbytes, "inputs")
        seconds = work.seconds(device, dtype, backward=True)
        if index not in self._kept:
            seconds += work.seconds(device, dtype)
        grads = sum(self._build.table[i].layout.grad_bytes for i in unit.pages)
        beside = fresh_seconds(self.times * grads + work.live_bytes, self._plan, self._machine)
        beside += summed_seconds((self.times - (not adds)) * grads, self._machine)
        total = self.times * (seconds + self._machine.unit_s)
        self.spend(f"backward of {unit.name}", total + beside)
        for read in reads:
            read.wait()

    def _move_inputs(self, channel: str, index: int) -> list[VirtualTicket]:
        """Move what a unit receives; each micro-batch has a file of its own, on any drive."""
        name, nbytes = self._build.units[index].name, self._work.units[index].input_bytes
        return [
            self._io.move(channel, nbytes, f"inputs of {name}, {micro}")
            for micro in range(self.times)
        ]

    def outside(self, *, backward: bool) -> None:
        """Play what is computed outside of units."""
        device, dtype = self._machine.device, self._training.dtype
        seconds = self._work.outside.seconds(device, dtype, backward=backward)
        self.spend("outside of units", self.times * seconds)

    def end(self, index: int) -> None:
        """Let go of what a unit held for backward."""
        for held in self._held.pop(index, ()):
            held.free()
