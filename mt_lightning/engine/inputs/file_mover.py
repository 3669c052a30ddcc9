"""Moves one tensor's memory to a page file and back."""

from __future__ import annotations

import contextlib

import torch

from mt_lightning.engine.inputs.files import InputFiles
from mt_lightning.engine.inputs.item import Copy, Item, Taken
from mt_lightning.engine.inputs.mover import Mover
from mt_lightning.engine.inputs.tensors import Shape, empty, fill, plainly, raw
from mt_lightning.engine.inputs.through import Through
from mt_lightning.engine.spill import Ring
from mt_lightning.errors import StorageError
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.sizes import align_up
from mt_lightning.tiers.arena import Arena, Frame
from mt_lightning.tiers.io import IOQueue, Ticket
from mt_lightning.tiers.spans import Span


class FileMover(Mover):
    """Writes through a few frames, since direct I/O wants aligned memory; reads into whole ones.

    Args:
        io: The threads that move bytes and check sums.
        arena: Where frames come from.
        files: Where bytes go.
        stats: Counts bytes once they are moved.
        through: The frames that bytes are written through.
    """

    setting = "max_ram_gb"
    blocks = "offload_dir is in memory"

    def __init__(
        self, io: IOQueue, arena: Arena, files: InputFiles, stats: Stats, through: Through
    ) -> None:
        self._io = io
        self._arena = arena
        self._files = files
        self._stats = stats
        self._through = through
        self.usable = files.usable
        self._writing: list[tuple[Copy, int, Ticket, int]] = []
        self._reading: list[tuple[Ticket, int]] = []
        self._orphans: list[tuple[Frame, Reservation | None]] = []

    @property
    def share_bytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the frames take that bytes are written through."""
        return self._through.share_bytes

    def room_bytes(self) -> int:
        """Return how many bytes the disk is expected to take."""
        return self._files.room_bytes()

    def takes(self, nbytes: int) -> bool:
        """Return True: a disk that is full is an error."""
        del nbytes
        return True

    def settle_oldest(self) -> bool:
        """Return False: memory is given back as soon as its bytes are in a frame."""
        return False

    def end_of_step(self) -> None:
        """Delete files that were of no use in the last step."""
        self._files.end_of_step()

    def write(self, item: Item) -> None:
        """Write a tensor, unless the file has these values, and take its memory away.

        Raises:
            BudgetError: `max_disk_gb` has no room for it.
            StorageError: The disk has none, or an earlier write failed.
        """
        self._through.prepare()
        ring, part_bytes = self._through.ring, self._through.part_bytes
        tensor = item.ref()
        assert tensor is not None
        assert item.copy is None or isinstance(item.copy, Copy)
        with plainly(), Span("spill inputs"):
            if item.copy is None or item.copy.taken.version != tensor._version:
                self.forget_copy(item)
                try:
                    self._copy(item, tensor, ring, part_bytes)
                except BaseException:
                    # Half a copy must not be taken for a whole one.
                    self.forget_copy(item)
                    raise
            empty(tensor)
        item.away = True
        del tensor
        self.free_frame(item)

    def _copy(self, item: Item, tensor: torch.Tensor, ring: Ring, part_bytes: int) -> None:
        shape = Shape(tensor)
        base = None if tensor._base is None else Shape(tensor._base)
        nbytes = align_up(shape.nbytes)
        name = self._files.take(nbytes)
        copy = Copy(Taken(nbytes, tensor._version, shape, base), name, part_bytes)
        item.copy = copy
        source = raw(tensor, shape.span_bytes)
        for start in range(0, nbytes, part_bytes):
            self._write_part(copy, source, start, ring)

    def _write_part(self, copy: Copy, source: torch.Tensor, start: int, ring: Ring) -> None:
        length = min(copy.part_bytes, copy.nbytes - start)
        frame = ring.acquire()
        assert frame is not None
        shape = copy.taken.shape
        first = max(0, start - shape.phase)
        last = min(shape.span_bytes, start + length - shape.phase)
        at = shape.phase + first - start
        if first < last:
            frame.tensor[at : at + last - first].copy_(source[first:last])
        ticket = self._io.write(copy.name, [(start, frame.memory[:length])])
        ring.release(frame, ticket)
        copy.parts.append(ticket)
        self._writing.append((copy, len(copy.parts) - 1, ticket, length))

    def begin_read(self, item: Item, room: Reservation | None) -> None:
        """Begin to read a tensor back into a frame of its own.

        Raises:
            StorageError: It had not been written.
        """
        copy = item.copy
        assert isinstance(copy, Copy)
        assert item.frame is None
        sums = copy.sums()
        frame = self._arena.alloc(copy.nbytes)
        item.frame, item.room = frame, room
        item.read = self._io.read(copy.name, copy.pieces(frame), sums=sums)
        self._reading.append((item.read, copy.nbytes))

    def end_read(self, item: Item) -> None:
        """Wait for the bytes and give them to the tensor.

        Raises:
            CorruptPageError: They are not what was written.
            StorageError: They could not be read.
        """
        tensor = item.ref()
        assert tensor is not None
        assert isinstance(item.read, Ticket)
        assert item.frame is not None
        assert item.copy is not None
        item.read.wait()
        item.read = None
        with plainly():
            fill(tensor, item.frame.tensor, item.copy.taken.shape, item.copy.taken.base)
        item.away = False

    def give_up_read(self, item: Item) -> None:
        """Drop what was read ahead of need."""
        assert item.away
        if isinstance(item.read, Ticket):
            # Nobody wants these bytes now; whoever does reads them again.
            with contextlib.suppress(StorageError):
                item.read.wait()
            item.read = None
        self.free_frame(item)

    def free_frame(self, item: Item) -> None:
        """Give a tensor's memory back to the budget, and its frame to the arena."""
        frame, room, item.frame, item.room = item.frame, item.room, None, None
        if frame is not None:
            assert isinstance(frame, Frame)
            self._orphans.append((frame, room))
            self.collect()
        elif room is not None:
            room.free()

    def forget_copy(self, item: Item) -> None:
        """Give the file of a tensor back."""
        copy, item.copy = item.copy, None
        if copy is None:
            return
        assert isinstance(copy, Copy)
        for part in copy.parts:
            # Nobody wants what it holds. It is not written again while a thread writes to it.
            if isinstance(part, Ticket):
                with contextlib.suppress(StorageError):
                    part.wait()
        self._files.give(copy.name)

    def collect(self) -> None:
        """Free the frames whose last view has died."""
        alive = []
        for frame, room in self._orphans:
            if frame.in_use():
                alive.append((frame, room))
                continue
            self._arena.free(frame)
            if room is not None:
                room.free()
        self._orphans = alive

    def count(self) -> None:
        """Bring the counters of moved bytes up to date; keep of writes their checksums alone."""
        writing, self._writing = self._writing, []
        for copy, index, ticket, nbytes in writing:
            if not ticket.done():
                self._writing.append((copy, index, ticket, nbytes))
                continue
            self._stats.inputs_spilled_bytes += nbytes
            if not ticket.failed:
                copy.parts[index] = list(ticket.sums)
        reading, self._reading = self._reading, []
        for ticket, nbytes in reading:
            if ticket.done():
                self._stats.inputs_read_bytes += nbytes
            else:
                self._reading.append((ticket, nbytes))

    def close(self) -> None:
        """Let go of frames that somebody still has views of, and delete all files."""
        self.collect()
        for frame, room in self._orphans:
            self._arena.forget(frame)
            if room is not None:
                room.free()
        self._orphans.clear()
        for ticket in (*(each[2] for each in self._writing), *(each[0] for each in self._reading)):
            with contextlib.suppress(StorageError):
                ticket.wait()
        self.count()
        self._files.discard_all()
        self._through.close()
