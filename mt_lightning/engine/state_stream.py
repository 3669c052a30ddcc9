"""Chunks of optimizer state on their way between disk and RAM.

[Note: coded chunks]
Where state is coded on disk, a chunk's stream passes through a frame of its own: it is read ahead
there, expanded into the one plain frame when the update gets to it, and compressed into another
one, from which it is written while the next chunk is updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mt_lightning.engine.spill import Ring
from mt_lightning.optim.codec import StateCodec
from mt_lightning.pages.sizes import align_up
from mt_lightning.pages.state import Chunk
from mt_lightning.pages.table import Page
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import IOQueue, Ticket


@dataclass
class Loaded:
    """A chunk's state in RAM or on its way.

    Attributes:
        chunk: The chunk.
        frame: Its state, as the optimizer sees it; None while only a stream is there.
        resident: Whether the frame is the chunk's own.
        stream: What is read from disk where state is coded.
        read: The read, None when there is nothing to read.
    """

    chunk: Chunk
    frame: Frame | None = None
    resident: bool = False
    stream: Frame | None = None
    read: Ticket | None = None


@dataclass
class Stored:
    """A chunk's write: its ticket, and how many bytes of its slot count."""

    ticket: Ticket | None
    length: int

    @property
    def sums(self) -> list[int]:
        """The checksums, once it is written."""
        return list(self.ticket.sums) if self.ticket is not None else []


class StateStream:
    """Loads and stores chunks; called from one thread at a time.

    Args:
        io: I/O threads.
        ring: Plain frames for chunks that do not stay.
        streams: Frames for coded chunks.
        resident: Frames of the chunks that stay, by page and chunk.
    """

    def __init__(
        self, io: IOQueue, ring: Ring, streams: Ring, resident: Mapping[tuple[int, int], Frame]
    ) -> None:
        self._io = io
        self._ring = ring
        self._streams = streams
        self._resident = resident
        self._valid: set[tuple[int, int]] = set()

    def forget(self) -> None:
        """Distrust all state kept in RAM; it is read again."""
        self._valid.clear()

    def load(self, page: Page, chunk: Chunk, *, wait: bool) -> Loaded | None:
        """Begin to bring a chunk's state; None when that would have to wait for a frame."""
        if not chunk.nbytes:
            return Loaded(chunk)
        key = (page.index, chunk.index)
        loaded = Loaded(chunk, self._resident.get(key))
        loaded.resident = loaded.frame is not None
        if key in self._valid:
            return loaded
        written = page.state.slot is not None and any(
            page.small[segment.param].present for segment in chunk.segments
        )
        if page.state_layout.slots:
            # The one plain frame is for the chunk that is stepped, and is taken when it is.
            return self._load_stream(page, loaded, wait) if written else loaded
        if loaded.frame is None:
            loaded.frame = self._ring.acquire(wait=wait)
            if loaded.frame is None:
                return None
        if written:
            pieces = chunk.split(loaded.frame.memory)
            sums = page.state.sums[chunk.index]
            loaded.read = self._io.read(page.state.file, pieces, sums=sums)
        return loaded

    def _load_stream(self, page: Page, loaded: Loaded, wait: bool) -> Loaded | None:
        loaded.stream = self._streams.acquire(wait=wait)
        if loaded.stream is None:
            return None
        index = loaded.chunk.index
        offset, _ = page.state_layout.slots[index]
        memory = loaded.stream.memory[: align_up(page.state.lengths[index])]
        sums = page.state.sums[index]
        loaded.read = self._io.read(page.state.file, [(offset, memory)], sums=sums)
        return loaded

    def finish(self, page: Page, loaded: Loaded, codec: StateCodec) -> None:
        """Wait until a chunk's state is in its frame."""
        if loaded.read is not None:
            loaded.read.wait()
        if not loaded.chunk.nbytes:
            return
        if loaded.frame is None:
            loaded.frame = self._ring.acquire()
            assert loaded.frame is not None
        if loaded.stream is not None:
            length = page.state.lengths[loaded.chunk.index]
            codec.decode(loaded.stream.tensor[:length], loaded.frame.tensor[: loaded.chunk.nbytes])
            self._streams.release(loaded.stream)
            loaded.stream = None
        elif loaded.read is None and page.state_layout.slots and not self._is_valid(page, loaded):
            # What lay in the frame before would only make the stream longer.
            loaded.frame.tensor[: loaded.chunk.nbytes].zero_()

    def _is_valid(self, page: Page, loaded: Loaded) -> bool:
        return (page.index, loaded.chunk.index) in self._valid

    def store(self, page: Page, name: str, loaded: Loaded, codec: StateCodec) -> Stored:
        """Begin to write a chunk's state to the file `name`; its frame goes back to the ring."""
        chunk, frame = loaded.chunk, loaded.frame
        if frame is None:
            return Stored(None, 0)
        if page.state_layout.slots:
            stream = self._streams.acquire()
            assert stream is not None
            length = codec.encode(frame.tensor[: chunk.nbytes], stream.tensor)
            padded = align_up(length)
            stream.tensor[length:padded].zero_()
            offset, _ = page.state_layout.slots[chunk.index]
            stored = Stored(self._io.write(name, [(offset, stream.memory[:padded])]), length)
            self._streams.release(stream, stored.ticket)
            self._keep(page, loaded, None)
        else:
            stored = Stored(self._io.write(name, chunk.split(frame.memory)), chunk.nbytes)
            self._keep(page, loaded, stored.ticket)
        return stored

    def _keep(self, page: Page, loaded: Loaded, ticket: Ticket | None) -> None:
        assert loaded.frame is not None
        if loaded.resident:
            self._valid.add((page.index, loaded.chunk.index))
        else:
            self._ring.release(loaded.frame, ticket)
