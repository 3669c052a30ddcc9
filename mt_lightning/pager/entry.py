"""What a pool knows of a page it holds, wherever its memory is."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from mt_lightning.pager.budget import Budget, Reservation
from mt_lightning.pager.replacement import NextUse, choose
from mt_lightning.pages.table import Page
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.link import DeviceFrame

F = TypeVar("F", Frame, DeviceFrame)


class Entry(ABC, Generic[F]):
    """One page's weights in one tier.

    Args:
        page: The page.
        frame: Its memory.
        reservation: Its bytes of the budget.

    Attributes:
        pins: How many users forbid eviction.
        dirty: Whether the frame holds bytes that the tier below does not have.
    """

    def __init__(self, page: Page, frame: F, reservation: Reservation) -> None:
        self.page = page
        self.frame: F = frame
        self.reservation = reservation
        self.pins = 0
        self.dirty = False

    @property
    def index(self) -> int:
        """Number of the page."""
        return self.page.index

    @property
    def nbytes(self) -> int:
        """Bytes that are free once it is given up."""
        return self.reservation.nbytes

    @property
    def idle(self) -> bool:
        """Whether nobody needs it now."""
        return not self.pins and not self.frame.in_use()


E = TypeVar("E", bound="Entry[Frame] | Entry[DeviceFrame]")


def drop_idle(
    entries: Callable[[], Iterable[E]],
    next_use: NextUse,
    budget: Budget,
    nbytes: int,
    drop: Callable[[E], None],
) -> bool:
    """Drop what nobody uses until `nbytes` can be reserved.

    Args:
        entries: Returns what is held.
        next_use: When each is needed.
        budget: Counts it.
        nbytes: Bytes to have.
        drop: Drops one.

    Returns:
        False where that is not enough; then none is dropped.
    """
    if budget.available_bytes >= nbytes:
        return True
    idle_bytes = sum(entry.nbytes for entry in entries() if entry.idle)
    if budget.available_bytes + idle_bytes < nbytes:
        return False
    while budget.available_bytes < nbytes:
        victim = choose(entries(), next_use)
        assert victim is not None
        drop(victim)
    return True
