"""This machine, by the rates that `megatrain bench machine` has measured."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mt_lightning.errors import ConfigError
from mt_lightning.planning.machines import Device, Drive, Machine
from mt_lightning.planning.profile import MachineProfile
from mt_lightning.tiers.filesystem import free_bytes

_UNIT_S = 1e-3
"""What entering and leaving a unit costs on a CPU, measured on a busy 2-core Zen 5."""
_OP_S = 4e-6
"""What an operation of torch costs on a CPU however small it is."""


def machine_here(
    profile: MachineProfile, directories: Sequence[str | os.PathLike[str]] = ()
) -> Machine:
    """Describe the machine of a profile, computing on its processors.

    Args:
        profile: What was measured.
        directories: Where pages will lie, one per drive; none: on the drives that were measured.

    Raises:
        ConfigError: A rate is missing.
    """
    if "float32" not in profile.flops_per_s or profile.memory_bytes_per_s is None:
        raise ConfigError(
            "the machine profile says nothing of matrix products or of memory. Measure the whole "
            "machine: megatrain bench machine."
        )
    chosen = [(os.fspath(d), profile.drive(d)) for d in directories]
    missing = [directory for directory, rates in chosen if rates is None]
    if missing or not profile.drives:
        where = ", ".join(missing) or "any drive"
        raise ConfigError(
            f"the machine profile of {profile.measured_at[:10]} has no rates of {where}; it has "
            f"those of {', '.join(d.directory for d in profile.drives) or 'none'}. Measure it: "
            f"megatrain bench machine {' '.join(missing)}".rstrip()
            + "."
        )
    found = [(directory, rates) for directory, rates in chosen if rates is not None]
    drives = {rates.device: (directory, rates) for directory, rates in found} or {
        rates.device: (rates.directory, rates) for rates in profile.drives
    }
    rates32 = profile.flops_per_s["float32"]
    return Machine(
        name=str(profile.host),
        device=Device(
            name="CPU",
            memory_bytes=None,
            flops_per_s={
                "float32": rates32,
                "bfloat16": profile.flops_per_s.get("bfloat16", rates32),
            },
            memory_bytes_per_s=profile.memory_bytes_per_s,
            launch_s=_OP_S,
            source=f"measured {profile.measured_at}",
        ),
        ram_bytes=profile.host.memory_gib << 30,
        ram_bytes_per_s=profile.memory_bytes_per_s,
        drives=tuple(
            Drive(
                name=directory,
                size_bytes=_room(directory),
                read_bytes_per_s=rates.read_bytes_per_s,
                write_bytes_per_s=rates.write_bytes_per_s,
                mixed_bytes_per_s=rates.mixed_read_bytes_per_s + rates.mixed_write_bytes_per_s,
                source=f"measured {profile.measured_at}",
            )
            for directory, rates in drives.values()
        ),
        update_params_per_s=dict(profile.update_params_per_s),
        unit_s=_UNIT_S,
        fresh_bytes_per_s=profile.fresh_bytes_per_s,
        measured=True,
    )


def _room(directory: str) -> int:
    try:
        return max(1, free_bytes(directory))
    except OSError:
        # A profile of another machine: the drive is not here to be asked.
        return 1 << 62
