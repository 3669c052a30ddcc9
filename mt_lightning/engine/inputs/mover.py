"""Moves one tensor's memory away and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from mt_lightning.engine.inputs.item import Item
from mt_lightning.pager.budget import Reservation


class Memory(Protocol):
    """Where inputs lie while nobody moves them: that of the host, or of a device."""

    def reserve(self, nbytes: int, purpose: str, what: str) -> Reservation:
        """Make room and reserve."""
        ...

    def can_reserve(self, nbytes: int) -> bool:
        """Return whether `reserve` would take nothing from anything in use."""
        ...


class Mover(ABC):
    """The way of inputs to where they wait for backward.

    Attributes:
        setting: The budget that inputs lie in until they go.
        blocks: What may keep all of them there, as a sentence.
        usable: Whether there is a way at all.
        share_bytes: What it takes of the room for inputs.
    """

    setting: str
    blocks: str
    usable: bool
    share_bytes: int = 0

    @abstractmethod
    def room_bytes(self) -> int:
        """Return how many bytes are expected to find room there."""

    @abstractmethod
    def takes(self, nbytes: int) -> bool:
        """Return whether that many more bytes find room there."""

    @abstractmethod
    def write(self, item: Item) -> None:
        """Copy a tensor, unless the copy has these values, and take its memory away.

        Raises:
            BudgetError: There is no room for it.
            StorageError: It could not be written.
        """

    @abstractmethod
    def settle_oldest(self) -> bool:
        """Wait for the oldest copy that holds memory; False where none does."""

    @abstractmethod
    def begin_read(self, item: Item, room: Reservation | None) -> None:
        """Begin to bring a tensor back into a frame of its own.

        Raises:
            StorageError: It had not been written.
        """

    @abstractmethod
    def end_read(self, item: Item) -> None:
        """Wait for the bytes and give them to the tensor.

        Raises:
            CorruptPageError: They are not what was written.
            StorageError: They could not be read.
        """

    @abstractmethod
    def give_up_read(self, item: Item) -> None:
        """Drop what was brought ahead of need."""

    @abstractmethod
    def free_frame(self, item: Item) -> None:
        """Give a tensor's memory back to the budget."""

    @abstractmethod
    def forget_copy(self, item: Item) -> None:
        """Give back what the copy of a tensor takes."""

    @abstractmethod
    def collect(self) -> None:
        """Free the frames whose last view has died."""

    @abstractmethod
    def count(self) -> None:
        """Bring the counters of moved bytes up to date."""

    @abstractmethod
    def end_of_step(self) -> None:
        """Give back what was of no use in the last step."""

    @abstractmethod
    def close(self) -> None:
        """Let go of frames that somebody still has views of, and of all copies."""
