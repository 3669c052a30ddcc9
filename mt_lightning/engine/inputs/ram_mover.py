"""Moves one tensor's memory from a device to the host and back.

[Note: when memory of the device is free]
A tensor is emptied at once, and its bytes stay reserved until they have left: the host runs ahead
of the device, which may not even have made them. So the oldest copy is waited for where memory is
short, and before the next one is begun but one: copies leave behind compute, and few at a time.
"""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from mt_lightning.engine.inputs.item import Item, RamCopy, Taken
from mt_lightning.engine.inputs.mover import Mover
from mt_lightning.engine.inputs.tensors import Shape, empty, fill, plainly, raw
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.sizes import align_up
from mt_lightning.tiers.arena import Arena, Frame
from mt_lightning.tiers.link import DeviceFrame, Download, Link, Upload
from mt_lightning.tiers.spans import Span

_MOST_LEAVING = 1
"""Copies that may be on their way when another one is begun."""
_PURPOSE = "input frames"


class RamMover(Mover):
    """Copies through the link; called by the thread that trains.

    Args:
        link: The way to the host.
        pool: Gives host memory.
        arena: Where its frames come from.
        limit_bytes: The share of the host's budget that inputs may take.
        stats: Counts bytes.
    """

    setting = "max_vram_gb"
    blocks = "max_ram_gb has no room for them"

    def __init__(
        self, link: Link, pool: WeightPool, arena: Arena, limit_bytes: int, stats: Stats
    ) -> None:
        self._link = link
        self._pool = pool
        self._arena = arena
        self._limit_bytes = limit_bytes
        self._stats = stats
        self._held_bytes = 0
        self._leaving: deque[tuple[Download, Reservation | None]] = deque()
        self._dropped: list[tuple[Frame, Reservation]] = []
        self.usable = limit_bytes > 0

    def room_bytes(self) -> int:
        """Return the share of inputs."""
        return self._limit_bytes

    def takes(self, nbytes: int) -> bool:
        """Return whether that many more bytes fit, be they aligned or not."""
        return self._held_bytes + align_up(nbytes) + align_up(1) <= self._limit_bytes

    def write(self, item: Item) -> None:
        """Begin to copy a tensor and take its memory away.

        Raises:
            BudgetError: The host has no room for it.
        """
        tensor = item.ref()
        assert tensor is not None
        while len(self._leaving) > _MOST_LEAVING:
            self.settle_oldest()
        with plainly(), Span("send inputs away"):
            shape = Shape(tensor)
            base = None if tensor._base is None else Shape(tensor._base)
            nbytes = align_up(shape.nbytes)
            # What comes back has another address, of which nothing depends on a device.
            room = self._pool.reserve(nbytes, _PURPOSE, "the inputs of a unit")
            frame = self._arena.alloc(nbytes)
            into = frame.tensor[shape.phase : shape.phase + shape.span_bytes]
            download = self._link.download(raw(tensor, shape.span_bytes), into)
            item.copy = RamCopy(Taken(nbytes, tensor._version, shape, base), frame, room, download)
            empty(tensor)
        self._held_bytes += nbytes
        self._stats.inputs_offloaded_bytes += nbytes
        self._leaving.append((download, item.room))
        item.room = None
        item.away = True

    def settle_oldest(self) -> bool:
        """Wait for the oldest copy and give the memory back that it has left."""
        if not self._leaving:
            return False
        download, room = self._leaving.popleft()
        try:
            self._link.done(download)
        finally:
            if room is not None:
                room.free()
        return True

    def begin_read(self, item: Item, room: Reservation | None) -> None:
        """Begin to bring a tensor back into new memory of the device."""
        copy = item.copy
        assert isinstance(copy, RamCopy)
        frame = self._link.frame(copy.frame.nbytes)
        item.frame, item.room = frame, room
        self._link.done(copy.download)
        item.read = self._link.upload(copy.frame.tensor, frame)
        self._stats.inputs_returned_bytes += copy.frame.nbytes

    def end_read(self, item: Item) -> None:
        """Let compute wait for the bytes and give their memory to the tensor."""
        tensor, copy, frame = item.ref(), item.copy, item.frame
        assert tensor is not None
        assert isinstance(item.read, Upload)
        assert isinstance(copy, RamCopy)
        assert isinstance(frame, DeviceFrame)
        with plainly():
            fill(tensor, self._link.wait(item.read), copy.taken.shape, copy.taken.base)
        item.read = item.frame = None  # the tensor alone holds its memory now
        item.away = False
        self.forget_copy(item)

    def give_up_read(self, item: Item) -> None:
        """Drop what was brought ahead of need."""
        assert item.away
        if isinstance(item.read, Upload):
            # Nobody wants these bytes now; but their memory is free for others behind the copy.
            with contextlib.suppress(Exception):
                self._link.wait(item.read)
            item.read = None
        self.free_frame(item)

    def free_frame(self, item: Item) -> None:
        """Give the memory of the device back; compute has been made to wait for its copy."""
        room, item.frame, item.room = item.room, None, None
        if room is not None:
            room.free()

    def forget_copy(self, item: Item) -> None:
        """Give the host's memory back once nothing writes to it."""
        copy, item.copy = item.copy, None
        if copy is None:
            return
        assert isinstance(copy, RamCopy)
        self._held_bytes -= copy.taken.nbytes
        if any(copy.download is download for download, _ in self._leaving):
            while self._leaving and self.settle_oldest():
                pass
        self._link.done(copy.download)
        copy.download.host = torch.empty(0)  # the lane may hold the download for a moment longer
        self._dropped.append((copy.frame, copy.room))
        self.collect()

    def collect(self) -> None:
        """Free the frames that no copy reads any more."""
        kept = []
        for frame, room in self._dropped:
            if frame.in_use():
                kept.append((frame, room))
                continue
            self._arena.free(frame)
            room.free()
        self._dropped = kept

    def count(self) -> None:
        """Do nothing: bytes are counted when their copy is begun."""

    def end_of_step(self) -> None:
        """Do nothing: no copy outlives its tensor."""

    def close(self) -> None:
        """Wait for what is on its way and let go of all frames."""
        while self._leaving:
            with contextlib.suppress(Exception):
                self.settle_oldest()
        self._dropped, dropped = [], self._dropped
        for frame, room in dropped:
            (self._arena.forget if frame.in_use() else self._arena.free)(frame)
            room.free()
