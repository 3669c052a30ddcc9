"""What a run needs on the device, from sizes alone and before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mt_lightning.engine.build import Build
from mt_lightning.engine.needs import master_bytes_of
from mt_lightning.engine.units import Unit
from mt_lightning.errors import BudgetError
from mt_lightning.pages.sizes import align_up

GIB = 1 << 30
VRAM_SHARE = 0.7
"""Of the device memory that is free: the budget where none is given. The rest is for activations,
which nobody can know before the model has run."""
_UNITS_AHEAD = 2
"""Largest units that may be on their way to the device ahead of their use."""


@dataclass(frozen=True)
class DevicePlan:
    """Sizes in bytes.

    Attributes:
        device: Its name.
        limit_bytes: The budget, infinite where nobody knows what the device has.
        min_bytes: The smallest budget that works.
        largest_unit: Name of the unit that decides it.
        weight_bytes: All weights.
        kept_bytes: Parameters outside units, which stay there, and their gradients.
        ahead_bytes: Weights that may be on their way ahead of their use.
        graph_bytes: Room for graphs of units that are kept until backward.
        inputs_bytes: Room for the inputs of units; what is above it goes to RAM.
        sweep_bytes: What a pass forward and back brings of weights, where all are updated.
        home_bytes: Gradients and optimizer state that stay there, and are updated there.
        host_reason: Why the host updates; empty where it does not.
    """

    device: str
    limit_bytes: int
    min_bytes: int
    largest_unit: str
    weight_bytes: int
    kept_bytes: int
    ahead_bytes: int
    graph_bytes: int
    inputs_bytes: int
    sweep_bytes: int
    home_bytes: int = 0
    host_reason: str = ""

    @property
    def holds_all(self) -> bool:
        """Whether all weights stay there, and are brought once per update."""
        return self.limit_bytes - self.min_bytes >= self.weight_bytes

    @property
    def updates(self) -> bool:
        """Whether all of the run stays there, and is updated there."""
        return self.home_bytes > 0

    def rows(self) -> list[tuple[str, int, str]]:
        """Return (item, bytes, place) for a table of what goes where."""
        how = "all weights stay" if self.holds_all else "weights as they are needed"
        rows = [
            ("budget max_vram_gb", self.limit_bytes, f"{self.device}: {how}, activations beside"),
            (f"  smallest that works ({self.largest_unit})", self.min_bytes, self.device),
            ("  parameters outside units", self.kept_bytes, f"{self.device}, for good"),
            ("  on their way ahead of use", self.ahead_bytes, self.device),
            ("  room for graphs of units", self.graph_bytes, f"{self.device}, until backward"),
            ("  room for inputs of units", self.inputs_bytes, f"{self.device}; the rest in RAM"),
        ]
        if self.updates:
            home = f"{self.device}: updates run there, commits copy from it"
            rows.insert(2, ("  gradients and optimizer state", self.home_bytes, home))
        elif self.host_reason:
            rows.insert(2, ("  updated there", 0, f"the host updates: {self.host_reason}"))
        return rows


def vram_limit_bytes(max_vram_gb: float | None, free: int | None) -> int:
    """Return the device budget in bytes: what was given, or most of what is free."""
    if max_vram_gb is not None:
        return int(max_vram_gb * GIB)
    return 1 << 62 if free is None else int(VRAM_SHARE * free)


def plan_device(
    build: Build,
    device: str,
    limit_bytes: int,
    *,
    trains: bool,
    recompute: bool | Literal["auto"],
    at_home: bool = False,
) -> DevicePlan:
    """Decide what stays on the device.

    Args:
        build: The pages.
        device: Its name.
        limit_bytes: The budget.
        trains: Whether there are optimizers.
        recompute: Whether units run again in backward.
        at_home: Whether the run may be updated there, if it fits.

    Raises:
        BudgetError: The budget is too small; `smallest_gb` on the error is one that works.
    """
    kept = sum(
        build.table[index].layout.nbytes + trains * build.table[index].layout.grad_bytes
        for index in build.resident
    )
    needs = [(_unit_need(unit, build, trains), unit.name) for unit in build.units]
    need, largest = max(needs, default=(0, "parameters outside units"))
    minimum = kept + need
    if limit_bytes < minimum:
        raise _too_small(device, limit_bytes, minimum, largest)
    room = limit_bytes - minimum
    weights = sum(page.layout.nbytes for page in build.table)
    widest = max((_weights(unit, build) for unit in build.units), default=0)
    home = _home_bytes(build) if at_home else 0
    if room < weights + home:
        home = 0
    elif home:
        room -= weights + home
    ahead = 0 if home else min(room, _UNITS_AHEAD * widest)
    graphs = 0
    if trains and recompute == "auto":
        # Where not all fits, graphs come after what is on its way: bringing a unit once more is
        # hidden behind compute, running it once more is not.
        graphs = max(0, room - ahead)
    # A pass brings what did not stay there at its turn; the last unit is there already.
    absent = 0 if home else 2 * max(0, weights - kept - widest - room)
    return DevicePlan(
        device,
        limit_bytes,
        minimum,
        largest,
        weights,
        kept,
        ahead,
        graphs,
        inputs_bytes=trains * room,  # what comes ahead of its use gives way
        sweep_bytes=absent,
        home_bytes=home,
    )


def _weights(unit: Unit, build: Build) -> int:
    return sum(build.table[index].layout.nbytes for index in unit.pages)


def _home_bytes(build: Build) -> int:
    """Return what a run keeps beside its weights: gradients, and state as the optimizer sees it.

    And room for the fp32 masters of what is being updated.
    """
    trained = [page for page in build.table if page.layout.optimizer is not None]
    resident = set(build.resident)  # their gradients are counted beside their weights
    grads = sum(page.layout.waiting_bytes for page in trained if page.index not in resident)
    chunks = [chunk for page in trained for chunk in page.state_layout.chunks]
    masters = master_bytes_of(trained, build.resident)
    return grads + sum(align_up(chunk.nbytes) for chunk in chunks) + masters


def _unit_need(unit: Unit, build: Build, trains: bool) -> int:
    """Bytes that must be on the device at once while `unit` runs, backward included."""
    need = _weights(unit, build)
    if trains:
        # Autograd holds one partial gradient of a shared page for each unit that it has passed.
        need += sum(
            page.layout.grad_bytes * max(1, len(page.layout.units))
            for page in build.table
            if page.index in unit.pages or len(page.layout.units) > 1
        )
    return need


def _too_small(device: str, limit: int, minimum: int, unit: str) -> BudgetError:
    smallest_gb = math.ceil(minimum / GIB * 1e6) / 1e6
    error = BudgetError(
        f"max_vram_gb={limit / GIB:.6g} is too small: unit {unit} needs {minimum / 2**20:.1f} MiB "
        f"on {device} at once (weights, gradients, and parameters outside units; activations come "
        f"on top). The smallest that works is max_vram_gb={smallest_gb:.6f}. Raise it, or name "
        "smaller units with units=[...]."
    )
    error.smallest_gb = smallest_gb
    return error
