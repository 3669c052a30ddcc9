"""The frames that inputs of units are written through."""

from __future__ import annotations

from mt_lightning.engine.spill import Ring
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pages.sizes import BLOCK_BYTES, align_down
from mt_lightning.tiers.arena import Arena, Frame

_SHARE = 8
"""A larger frame is one part in this many of what inputs may take."""


class Through:
    """A few small frames that are always there, and larger ones as soon as they find room.

    Args:
        pool: Gives memory.
        arena: Gives frames.
        frames: The small ones, all of one length; none where nothing is ever written.
        limit_bytes: What inputs may take.

    Attributes:
        ring: The frames to use.
        part_bytes: The length of each.
        share_bytes: What they take of the room for inputs.
    """

    def __init__(
        self, pool: WeightPool, arena: Arena, frames: list[Frame], limit_bytes: int
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._num_frames = len(frames)
        self._large: list[tuple[Frame, Reservation]] = []
        large_bytes = min(BLOCK_BYTES, align_down(limit_bytes // _SHARE))
        self.part_bytes = frames[0].nbytes if frames else 0
        self._large_bytes = large_bytes if large_bytes > self.part_bytes > 0 else 0
        self.ring = Ring(list(frames))
        self.share_bytes = 0

    def prepare(self) -> None:
        """Take the larger frames, once there is something to write and they fit."""
        if self._large or not self._large_bytes:
            return
        # From now on inputs leave room for them, whether it is there already or not.
        self.share_bytes = self._large_bytes * self._num_frames
        if not self._pool.can_reserve(self.share_bytes):
            return
        for _ in range(self._num_frames):
            room = self._pool.reserve(self._large_bytes, "state", "what inputs go through")
            self._large.append((self._arena.alloc(self._large_bytes), room))
        self.ring, self.part_bytes = Ring([frame for frame, _ in self._large]), self._large_bytes

    def close(self) -> None:
        """Give the larger frames back; nothing is being written."""
        for frame, room in self._large:
            self._arena.free(frame)
            room.free()
        self._large.clear()
