"""The machine of `megatrain plan`: a preset, this one, a profile, or numbers."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from mt_lightning.errors import ConfigError
from mt_lightning.planning.here import machine_here
from mt_lightning.planning.machines import (
    GIB,
    MACHINES,
    Device,
    Drive,
    Machine,
    changed,
    find_machine,
    parse_drives,
)
from mt_lightning.planning.profile import MachineProfile

_NEEDED = ("tflops", "ram_gb", "disk_tb", "read_gb_per_s", "write_gb_per_s")
_NUMBERS = (*_NEEDED, "device_gb", "link_gb_per_s")
_RAM_BYTES_PER_S = 50e9
_DEVICE_BYTES_PER_S = 500e9


def find(options: argparse.Namespace) -> Machine:
    """Return the machine that the command line describes.

    Raises:
        ConfigError: It is not known, or numbers are missing or wrong.
        StorageError: This machine has not been measured.
    """
    for name in _NUMBERS:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: give a number above 0.")
    if options.dir and options.machine != "here":
        raise ConfigError(f"--dir goes with --machine here, not with {options.machine!r}.")
    if options.time_units and options.machine != "here":
        raise ConfigError(
            f"--time-units runs units on this machine, and --machine is {options.machine!r}. Leave "
            "one of them out."
        )
    machine = _base(options)
    gb = 1e9
    flops = _times(options.tflops, 1e12)
    return changed(
        machine,
        ram_bytes=_whole(options.ram_gb, GIB),
        drives=None if options.drives is None else parse_drives(options.drives),
        device_memory_bytes=_whole(options.device_gb, GIB),
        device_flops_per_s=None if flops is None else {"float32": flops, "bfloat16": flops},
        device_up_bytes_per_s=_times(options.link_gb_per_s, gb),
        device_down_bytes_per_s=_times(options.link_gb_per_s, gb),
        drive_read_bytes_per_s=_times(options.read_gb_per_s, gb),
        drive_write_bytes_per_s=_times(options.write_gb_per_s, gb),
        drive_size_bytes=_whole(options.disk_tb, 1e12),
    )


def _base(options: argparse.Namespace) -> Machine:
    name = options.machine
    if name == "custom":
        return _custom(options)
    if name.lower() not in MACHINES:
        if name == "here":
            return machine_here(MachineProfile.load(), options.dir)
        if Path(name).is_file():
            return machine_here(MachineProfile.load(name, of_any_machine=True))
    return find_machine(name)


def _custom(options: argparse.Namespace) -> Machine:
    needed = [n for n in _NEEDED if n == "tflops" or n == "ram_gb" or options.drives is None]
    missing = [n for n in needed if getattr(options, n) is None]
    if missing:
        flags = ", ".join(f"--{n.replace('_', '-')}" for n in missing)
        raise ConfigError(f"--machine custom needs numbers: {flags} (or --drives) is missing.")
    if options.device_gb is not None and options.link_gb_per_s is None:
        raise ConfigError("--device-gb is the memory of an accelerator: give --link-gb-per-s too.")
    on_host = options.device_gb is None
    return Machine(
        name="custom",
        device=Device(
            name="CPU" if on_host else "device",
            memory_bytes=None if on_host else 1,
            flops_per_s={"float32": 1.0, "bfloat16": 1.0},
            memory_bytes_per_s=_RAM_BYTES_PER_S if on_host else _DEVICE_BYTES_PER_S,
            up_bytes_per_s=math.inf,
            down_bytes_per_s=math.inf,
        ),
        ram_bytes=GIB,
        ram_bytes_per_s=_RAM_BYTES_PER_S,
        drives=(Drive(name="drive", size_bytes=1, read_bytes_per_s=1, write_bytes_per_s=1),),
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _whole(value: float | None, factor: float) -> int | None:
    return None if value is None else int(min(value * factor, sys.float_info.max))
