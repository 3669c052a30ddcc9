"""How much room the inputs of a group of batches have, and what a pass over the weights moves."""

from __future__ import annotations

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.window.sums import largest_param_bytes

_MIB = 1 << 20


def rooms_of(engine: Engine, beside_bytes: int = 0) -> tuple[int, int, int]:
    """Return the room for inputs where units compute and elsewhere, and what a pass brings.

    On a host inputs go from RAM to disk, with a device from there to RAM.

    Args:
        engine: The attached engine.
        beside_bytes: What else takes room in RAM.
    """
    plan, away_bytes = engine.plan, engine.live.run.inputs.away_room_bytes
    assert plan is not None
    ram_bytes, there = plan.window_bytes - beside_bytes, plan.on_device
    if there is None:
        return ram_bytes, away_bytes, plan.sweep_bytes
    sweep_bytes = max(plan.sweep_bytes, there.sweep_bytes)
    near_bytes = there.inputs_bytes - largest_param_bytes(engine.live.run.build.table)
    return near_bytes, max(0, min(away_bytes, ram_bytes)), sweep_bytes


def too_narrow(engine: Engine, input_bytes: int) -> str:
    """Say that groups of batches would move more bytes than the usual order.

    Args:
        engine: The attached engine.
        input_bytes: What all units together receive from one batch.
    """
    near_bytes, away_bytes, sweep_bytes = rooms_of(engine)
    near, away = "max_ram_gb", "the disk"
    if not engine.machine.link.unified:
        near, away = "max_vram_gb", "max_ram_gb"
    return (
        f"the inputs of all units need {input_bytes / _MIB:.1f} MiB for each batch; {near} leaves "
        f"{max(0, near_bytes) / _MIB:.1f} MiB for them, {away} {away_bytes / _MIB:.1f} MiB, and a "
        f"pass reads {sweep_bytes / _MIB:.1f} MiB of weights. Batches run in the usual order, "
        f"which moves fewer bytes. Raise {near}, or set layer_major=False."
    )
