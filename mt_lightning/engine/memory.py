"""How much memory is free on the host and on a device, and what a run may take of it."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from mt_lightning.engine.options import Options
from mt_lightning.tiers.link import Link

log = logging.getLogger(__name__)

GIB = 1 << 30
RAM_SHARE = 0.8
"""Of the memory that is free: the budget where none is given."""


def ram_limit_bytes(max_ram_gb: float | None, there_gb: float = 0.0) -> int:
    """Return the host budget in bytes: what was given, or 80 % of what is free.

    Args:
        max_ram_gb: What was given.
        there_gb: Of what is free, what a device will take.
    """
    if max_ram_gb is not None:
        return int(max_ram_gb * GIB)
    return int(RAM_SHARE * max(0, host_free_bytes() - int(there_gb * GIB)))


def host_free_bytes() -> int:
    """Return the memory that host and cgroup leave free."""
    free = psutil.virtual_memory().available
    cgroup = cgroup_free_bytes()
    return free if cgroup is None else min(free, cgroup)


def device_free_bytes(link: Link, ram_limit: int) -> int | None:
    """Return the memory that a device has left, None where there is no telling.

    [Note: one memory] Where the device has none of its own, the driver counts what the page cache
    holds as used, although it is had for the asking; and the host's budget is taken from the same.

    Args:
        link: The way there.
        ram_limit: The host's budget.
    """
    return max(0, host_free_bytes() - ram_limit) if link.shared else link.free_bytes()


def budget_bytes(options: Options, link: Link) -> int:
    """Return the host budget of a run whose device may take from the same memory."""
    there_gb = options.max_vram_gb or 0.0 if link.shared else 0.0
    limit = ram_limit_bytes(options.max_ram_gb, there_gb)
    if there_gb and limit + there_gb * GIB > (free := host_free_bytes()):
        log.warning(
            "max_ram_gb=%.3f and max_vram_gb=%.3f are taken from one memory, of which %.3f GiB are "
            "free: the machine may run out of it. Lower one of them.",
            limit / GIB,
            there_gb,
            free / GIB,
        )
    return limit


def cgroup_free_bytes() -> int | None:
    """Return what this process's memory cgroups leave free, None where none sets a limit."""
    free = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        limit, usage = ("memory.max", "memory.current")
        if controllers:
            limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        inner = root / group.strip("/")
        for place in (inner, *inner.parents):
            most, used = _read(place / limit).strip(), _read(place / usage).strip()
            if most.isdigit() and used.isdigit() and int(most) < 1 << 60:
                free.append(max(0, int(most) - int(used)))
            if place == root:
                break
    return min(free, default=None)


def _read(path: Path) -> str:
    """Return a file of the kernel's, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
