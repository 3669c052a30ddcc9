"""Frames in device memory, recycled by size."""

from __future__ import annotations

from collections.abc import Callable

from mt_lightning.tiers.link import DeviceFrame


class DeviceArena:
    """The frames of one device. Freed frames are kept for the next request of the same size.

    [Note: no fragments] Each frame is an allocation of exactly its page's size, and has a storage
    of its own, whose use count tells whether autograd still holds a view. Pages of a model come in
    a few sizes, so a frame that is free fits the next page of its kind; frames of another size are
    given back whole.

    Args:
        make: Allocates a frame of that many bytes.
    """

    def __init__(self, make: Callable[[int], DeviceFrame]) -> None:
        self._make = make
        self._live: dict[int, DeviceFrame] = {}
        self._free: dict[int, list[DeviceFrame]] = {}
        self.held_bytes = 0

    def has_free(self, nbytes: int) -> bool:
        """Tell whether `alloc(nbytes)` would reuse a free frame."""
        return bool(self._free.get(nbytes))

    def alloc(self, nbytes: int) -> DeviceFrame:
        """Hand out a frame of exactly `nbytes` bytes."""
        free = self._free.get(nbytes)
        if free:
            frame = free.pop()
        else:
            frame = self._make(nbytes)
            self.held_bytes += nbytes
        self._live[id(frame)] = frame
        return frame

    def free(self, frame: DeviceFrame) -> None:
        """Take a frame back; it must be one of ours and no view of it may live."""
        assert not frame.in_use(), f"a frame of {frame.nbytes} bytes was freed while a view lives"
        assert self._live.pop(id(frame), None) is frame, "freed twice, or not from this arena"
        self._free.setdefault(frame.nbytes, []).append(frame)

    def trim(self, nbytes: int) -> int:
        """Let go of free frames, largest first, until `nbytes` went; return how many did."""
        gone_bytes = 0
        for size in sorted(self._free, reverse=True):
            while self._free[size] and gone_bytes < nbytes:
                self._free[size].pop()
                self.held_bytes -= size
                gone_bytes += size
            if not self._free[size]:
                del self._free[size]
        return gone_bytes

    def close(self) -> None:
        """Let go of every frame; one that is out goes back when its holder drops it."""
        self._free.clear()
        self._live.clear()
        self.held_bytes = 0
