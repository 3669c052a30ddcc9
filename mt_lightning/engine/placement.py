"""Where planes compute and graphs are kept: in host memory, or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mt_lightning.engine.device_plan import DevicePlan
from mt_lightning.pager.budget import Budget, Reservation
from mt_lightning.pager.device_pool import DevicePool
from mt_lightning.pager.planes import HostPlanes, Planes
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pager.stats import Stats
from mt_lightning.tiers.link import Link


@dataclass(frozen=True)
class Room:
    """Memory for graphs of units.

    Attributes:
        budget: What it is counted in.
        setting: The name of that budget.
        limit_bytes: What the plan leaves for graphs.
        has: Whether bytes can be reserved without taking them from anything in use.
        reserve: Makes room and reserves.
    """

    budget: Budget
    setting: str
    limit_bytes: int
    has: Callable[[int], bool]
    reserve: Callable[[int, str, str], Reservation]


def place_planes(
    on_device: DevicePlan | None,
    graph_bytes: int,
    link: Link,
    pool: WeightPool,
    budget: Budget,
    stats: Stats,
) -> tuple[Planes, Room]:
    """Make the place where units compute, and the room beside it.

    Args:
        on_device: What goes to a device, None where the host computes.
        graph_bytes: Room for graphs on the host.
        link: The way to the device.
        pool: The frames on the host.
        budget: Their budget.
        stats: Counters to keep.
    """
    if on_device is None:
        has = lambda nbytes: budget.available_bytes >= nbytes  # noqa: E731
        return HostPlanes(), Room(budget, "max_ram_gb", graph_bytes, has, pool.reserve)
    own = Budget(on_device.limit_bytes)
    planes = DevicePool(link, pool, own, stats, on_device.ahead_bytes)
    room = Room(own, "max_vram_gb", on_device.graph_bytes, planes.can_reserve, planes.reserve)
    return planes, room
