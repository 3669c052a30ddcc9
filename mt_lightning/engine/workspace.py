"""Frames lent for a while: for state that is brought in or given out whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mt_lightning.engine.spill import Ring
from mt_lightning.pager.pool import WeightPool
from mt_lightning.tiers.arena import Arena, Frame


class Workspace:
    """Lends the frames that chunks stream through where they are long enough, else new ones.

    Args:
        arena: Makes frames.
        pool: Makes room in the budget for new ones; None while nothing is attached.
        ring: Frames for plain state.
        streams: Frames for coded state.
    """

    def __init__(
        self,
        arena: Arena,
        pool: WeightPool | None = None,
        ring: Ring | None = None,
        streams: Ring | None = None,
    ) -> None:
        self._arena = arena
        self._pool = pool
        self._ring = ring
        self._streams = streams

    @contextmanager
    def plain(self, nbytes: int) -> Iterator[Frame]:
        """Lend a frame for a chunk of state."""
        with self._lend(self._ring, nbytes) as frame:
            yield frame

    @contextmanager
    def stream(self, nbytes: int) -> Iterator[Frame]:
        """Lend a frame for a coded chunk."""
        with self._lend(self._streams, nbytes) as frame:
            yield frame

    @contextmanager
    def _lend(self, ring: Ring | None, nbytes: int) -> Iterator[Frame]:
        frame = ring.acquire() if ring is not None else None
        try:
            if frame is not None and frame.nbytes >= nbytes:
                yield frame
            else:
                with self._new(nbytes) as own:
                    yield own
        finally:
            if ring is not None and frame is not None:
                ring.release(frame)

    @contextmanager
    def _new(self, nbytes: int) -> Iterator[Frame]:
        reservation = None
        if self._pool is not None:
            what = "optimizer state read or written whole"
            reservation = self._pool.reserve(nbytes, "state", what)
        frame = self._arena.alloc(nbytes)
        try:
            yield frame
        finally:
            self._arena.free(frame)
            if reservation is not None:
                reservation.free()
