"""Where inputs of units lie, and where they go: from RAM to disk, or from a device to RAM."""

from __future__ import annotations

from mt_lightning.engine.inputs.file_mover import FileMover
from mt_lightning.engine.inputs.files import InputFiles
from mt_lightning.engine.inputs.ram_mover import RamMover
from mt_lightning.engine.inputs.through import Through
from mt_lightning.engine.inputs.tier import InputTier
from mt_lightning.engine.machine import Machine
from mt_lightning.engine.plan import Plan
from mt_lightning.pager.budget import Budget
from mt_lightning.pager.device_pool import DevicePool
from mt_lightning.pager.planes import Planes
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pager.stats import Stats
from mt_lightning.tiers.arena import Frame


def place_inputs(
    plan: Plan,
    machine: Machine,
    pool: WeightPool,
    budget: Budget,
    planes: Planes,
    through: list[Frame],
    stats: Stats,
    *,
    max_disk_bytes: int | None,
    read_ahead: int,
) -> InputTier:
    """Make the tier of inputs.

    Args:
        plan: What they may take.
        machine: The tiers.
        pool: Gives memory of the host.
        budget: Counts it.
        planes: Where units compute.
        through: The frames that inputs are written to disk through.
        stats: Counters.
        max_disk_bytes: `max_disk_gb`, None for what is free.
        read_ahead: How many executions are read ahead of the one that runs.
    """
    files = InputFiles(
        machine.store,
        machine.directories,
        plan.disk_bytes,
        max_disk_bytes,
        usable=bool(through) and not machine.in_memory,
    )
    device = machine.link.device
    if isinstance(planes, DevicePool):
        assert plan.on_device is not None
        away = RamMover(machine.link, pool, machine.arena, plan.inputs_bytes, stats)
        most = plan.on_device.inputs_bytes
        return InputTier(planes, planes.budget, away, stats, device, most, read_ahead)
    room = Through(pool, machine.arena, through, plan.inputs_bytes)
    mover = FileMover(machine.io, machine.arena, files, stats, room)
    return InputTier(pool, budget, mover, stats, device, plan.inputs_bytes, read_ahead)
