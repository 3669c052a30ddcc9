"""What a run puts on a device, by the policy that decides it in a run; and when it stays there."""

from __future__ import annotations

from mt_lightning.engine.plan import Plan
from mt_lightning.pages.table import Page
from mt_lightning.planning.machines import Machine
from mt_lightning.tiers.accelerator import NUM_PIECES, PIECE_BYTES

DEVICE_SHARE = 0.92
"""Of the device's memory; the rest is the driver's, the context's and lost to fragmentation."""


class PlannedLink:
    """The way to a device that is not there: all that the choice of a plan asks of a link.

    Args:
        machine: Has the device.
    """

    unified = shared = False
    staging_bytes = 2 * NUM_PIECES * PIECE_BYTES

    def __init__(self, machine: Machine) -> None:
        self.device = machine.device.name
        self._free_bytes = int(DEVICE_SHARE * (machine.device.memory_bytes or 0))

    def free_bytes(self) -> int:
        """Return what the driver leaves."""
        return self._free_bytes


def stays_there(plan: Plan) -> bool:
    """Return whether weights, gradients and state live on the device and are updated there."""
    return plan.on_device is not None and plan.on_device.updates


def seconds_there(page: Page, machine: Machine) -> float:
    """Return how long the device updates a page: it reads and writes all of it once."""
    moved = 2 * page.layout.nbytes + page.layout.grad_bytes + 2 * page.state_layout.plain_bytes
    return moved / machine.device.memory_bytes_per_s
