"""The weights of a page on their way to disk, while the rest of the page is still updated."""

from __future__ import annotations

from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import IOQueue, Ticket


class WeightWriter:
    """Writes a frame block by block, as its bytes become final.

    The blocks are those of the checksums: a plane has the same ones however it was written.

    Args:
        io: I/O threads.
        name: The file.
        frame: The weights.
        first: Whether to go before other writes, since the training thread waits.
    """

    def __init__(self, io: IOQueue, name: str, frame: Frame, *, first: bool) -> None:
        self._io = io
        self._name = name
        self._memory = frame.memory
        self._first = first
        self._begun_bytes = 0
        self.tickets: list[Ticket] = []

    def final(self, num_bytes: int) -> None:
        """Begin to write the whole blocks among the first `num_bytes`, which change no more."""
        start = self._begun_bytes
        stop = self._memory.nbytes
        if num_bytes < stop:
            stop = num_bytes // BLOCK_BYTES * BLOCK_BYTES
        if stop > start:
            self._begun_bytes = stop
            self.tickets.append(self._io.write(self._name, [(start, self._memory[start:stop])]))
            if self._first:
                self._io.hurry(self.tickets[-1])

    def finish(self) -> None:
        """Begin to write the rest."""
        self.final(self._memory.nbytes)

    @property
    def sums(self) -> list[int]:
        """The checksum of each block, once all are written."""
        return [value for ticket in self.tickets for value in ticket.sums]
