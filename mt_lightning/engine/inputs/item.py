"""One tensor that executions of units received, and the copy of it elsewhere."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from mt_lightning.engine.inputs.tensors import Shape
from mt_lightning.pager.budget import Reservation
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import Ticket
from mt_lightning.tiers.link import DeviceFrame, Download, Upload


@dataclass
class Taken:
    """What a tensor was when it was copied.

    Attributes:
        nbytes: Length of the copy.
        version: The tensor's version; a later one has other values.
        shape: How it lies in memory.
        base: The same of what it is a view of, None where it is not.
    """

    nbytes: int
    version: int
    shape: Shape
    base: Shape | None


@dataclass
class RamCopy:
    """A copy of a tensor of a device in host memory.

    Attributes:
        taken: What the tensor was.
        frame: Its bytes.
        room: What is reserved for them.
        download: What brings them.
    """

    taken: Taken
    frame: Frame
    room: Reservation
    download: Download


@dataclass
class Copy:
    """A copy of a tensor in a file.

    Attributes:
        taken: What the tensor was.
        name: The file.
        part_bytes: Length of the parts that were summed one by one.
        parts: For each part the checksum of each block, or the ticket of its write.
    """

    taken: Taken
    name: str
    part_bytes: int
    parts: list[Ticket | list[int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Its payload."""
        return self.taken.nbytes

    def pieces(self, frame: Frame) -> list[tuple[int, memoryview]]:
        """Return the parts as they lie on a frame."""
        starts = range(0, self.nbytes, self.part_bytes)
        ends = (min(start + self.part_bytes, self.nbytes) for start in starts)
        return [(a, frame.memory[a:b]) for a, b in zip(starts, ends, strict=True)]

    def sums(self) -> list[int]:
        """Wait for the writes; return the checksum of each block.

        Raises:
            StorageError: A write failed.
        """
        self.wait()
        return [value for part in self.parts if isinstance(part, list) for value in part]

    def wait(self) -> None:
        """Wait for the writes, and keep their checksums alone: tickets are large.

        Raises:
            StorageError: A write failed.
        """
        for index, part in enumerate(self.parts):
            if isinstance(part, Ticket):
                self.parts[index] = list(part.wait().sums)


@dataclass(eq=False)
class Item:
    """A tensor that can be needed again in backward.

    Attributes:
        ref: The tensor.
        key: Its `id`.
        nbytes: What it counts, 0 where another tensor of the same storage counts.
        storage: Where its storage is, 0 where it has none.
        leaves: Whether it is of a kind that can go elsewhere.
        saved: How many checkpoints hold it by position.
        named: How many hold it by name.
        nested: How many hold it in a container, where references cannot be told apart.
        num_holders: How many executions hold it.
        room: Its bytes where it computes, as they are reserved; None while it is away or does not
            fit.
        frame: Its memory, where that was brought back; on a device only until it has been.
        read: What fills the frame.
        copy: The copy elsewhere.
        away: Whether it holds no memory.
    """

    ref: weakref.ref[torch.Tensor]
    key: int
    nbytes: int
    storage: int
    leaves: bool
    saved: int = 0
    named: int = 0
    nested: int = 0
    num_holders: int = 0
    room: Reservation | None = None
    frame: Frame | DeviceFrame | None = None
    read: Ticket | Upload | None = None
    copy: Copy | RamCopy | None = None
    away: bool = False

    @property
    def away_bytes(self) -> int:
        """Bytes of the copy."""
        assert self.copy is not None
        return self.copy.taken.nbytes


class Kept:
    """The inputs of one execution, for as long as it can be run again.

    Args:
        number: Counts executions.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Hold:
    """One argument of an execution: a tensor, and by how many references of which kind."""

    item: Item
    saved: int = 0
    named: int = 0
    nested: int = 0

    def take(self) -> None:
        """Count it."""
        self._add(1)

    def drop(self) -> None:
        """Count it no more."""
        self._add(-1)

    def _add(self, sign: int) -> None:
        item = self.item
        item.num_holders += sign
        item.saved += sign * self.saved
        item.named += sign * self.named
        item.nested += sign * self.nested
