"""How many batches run together, and where what their units receive waits for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mt_lightning.engine.build import Build
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.window.grouping import best_group
from mt_lightning.engine.window.sums import largest_param_bytes
from mt_lightning.planning.work import Work


@dataclass(frozen=True)
class Inputs:
    """What units receive from a group of batches.

    Attributes:
        group: Batches that a unit runs for while it is there.
        num_groups: Groups of a step, each of which is a sweep over all units and back.
        sizes: What each unit receives from a group, in bytes.
        away: Units whose inputs wait elsewhere than where units compute: on disk, or in RAM where a
            device computes.
    """

    group: int
    num_groups: int
    sizes: tuple[int, ...]
    away: frozenset[int]

    @property
    def near_bytes(self) -> int:
        """What waits where units compute."""
        return sum(self.sizes) - self.away_bytes

    @property
    def away_bytes(self) -> int:
        """What waits elsewhere."""
        return sum(self.sizes[unit] for unit in self.away)

    def of_step(self, micros: int) -> list[int]:
        """Return the size of each group of a step of so many batches."""
        return [min(self.group, micros - begun) for begun in range(0, micros, self.group)]


def inputs_of(
    build: Build, plan: Plan, units: Sequence[Work], micros: int, disk_bytes: int = 1 << 62
) -> Inputs:
    """Place what units receive, by the rules of a run.

    Args:
        build: The pages.
        plan: What stays where.
        units: What units receive; empty where that is not known.
        micros: Batches of a step.
        disk_bytes: Room on the drives.
    """
    there = plan.on_device
    near_bytes = plan.inputs_bytes if there is None else there.inputs_bytes
    away_bytes = disk_bytes if there is None else plan.inputs_bytes
    group = 1 if plan.order == "usual" else micros
    if group > 1 and units:
        rooms = plan.window_bytes, away_bytes, plan.sweep_bytes
        if there is not None:  # as `layer_major.groups.rooms_of`
            rooms = (
                near_bytes - largest_param_bytes(build.table),
                max(0, min(away_bytes, plan.window_bytes)),
                max(plan.sweep_bytes, there.sweep_bytes),
            )
        group = best_group(
            micros,
            input_bytes=sum(w.input_bytes for w in units),
            widest_bytes=max(w.input_bytes for w in units),
            near_bytes=rooms[0],
            away_bytes=rooms[1],
            sweep_bytes=rooms[2],
        )
    sizes = tuple(group * w.input_bytes for w in units)
    left, away = sum(sizes), set[int]()
    for unit, nbytes in enumerate(sizes):  # what backward needs last goes first
        if left <= near_bytes or sum(sizes) - left + nbytes > away_bytes:
            break
        away.add(unit)
        left -= nbytes
    return Inputs(group, -(-micros // group), sizes, frozenset(away))
