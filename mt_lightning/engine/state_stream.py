"""Chunks of optimizer state on their way between disk and RAM.

[Note: coded chunks]
Where state is coded on disk, a chunk's stream passes through a frame of its own: it is read ahead
there, expanded into the one plain frame when the update gets to it, and compressed into another
one, from which it is written while the next chunk is updated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mt_lightning.engine.device_state import DeviceState
from mt_lightning.engine.ending import wait_for_all
from mt_lightning.engine.spill import Ring
from mt_lightning.optim.codec import StateCodec
from mt_lightning.pages.sizes import align_up
from mt_lightning.pages.state import Chunk
from mt_lightning.pages.table import Page, PageTable, Plane
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import IOQueue, Ticket
from mt_lightning.tiers.spans import Span


@dataclass
class Loaded:
    """A chunk's state in RAM or on its way.

    Attributes:
        chunk: The chunk.
        frame: Its state, as the optimizer sees it; None while only a stream is there.
        resident: Whether the frame is the chunk's own.
        stream: What is read from disk where state is coded.
        read: The read, None when there is nothing to read.
        there: Its state on the device, where it is stepped there.
    """

    chunk: Chunk
    frame: Frame | None = None
    resident: bool = False
    stream: Frame | None = None
    read: Ticket | None = None
    there: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor | None:
        """What the optimizer steps, as bytes."""
        if self.there is not None:
            return self.there
        return None if self.frame is None else self.frame.tensor


@dataclass
class Stored:
    """A chunk's write: its ticket, and how many bytes of its slot count."""

    ticket: Ticket | None
    length: int

    @property
    def sums(self) -> list[int]:
        """The checksums, once it is written."""
        return list(self.ticket.sums) if self.ticket is not None else []


def settle(tickets: Sequence[Ticket | None]) -> None:
    """Wait for the end of every request, well or not."""
    with contextlib.suppress(Exception):
        wait_for_all(tickets)


class StateStream:
    """Loads and stores chunks; called from one thread at a time.

    Args:
        io: I/O threads.
        ring: Plain frames for chunks that do not stay.
        streams: Frames for coded chunks.
        resident: Frames of the chunks that stay, by page and chunk.
        keeps: Whether what stays is written by `write_back` only, not by every `store`.
        there: The state of chunks that are stepped on a device; then all of them stay.
    """

    def __init__(
        self,
        io: IOQueue,
        ring: Ring,
        streams: Ring,
        resident: Mapping[tuple[int, int], Frame],
        *,
        keeps: bool = False,
        there: DeviceState | None = None,
    ) -> None:
        self._io = io
        self._ring = ring
        self._streams = streams
        self._resident = resident
        self._keeps = keeps
        self._there = there
        self._valid: set[tuple[int, int]] = set()
        self._dirty: dict[tuple[int, int], StateCodec] = {}

    def forget(self) -> None:
        """Distrust all state kept in RAM; it is read again."""
        self._valid.clear()
        self._dirty.clear()
        if self._there is not None:
            self._there.forget()

    def come_home(self) -> None:
        """Let frames of the host hold what was stepped on a device."""
        if self._there is not None:
            self._there.come_home()

    def writes(self, page: Page) -> bool:
        """Return whether an update of `page` writes to its state plane at once."""
        chunks = [chunk for chunk in page.state_layout.chunks if chunk.nbytes]
        return not self._keeps or any((page.index, c.index) not in self._resident for c in chunks)

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

    @property
    def reads_ahead(self) -> bool:
        """Whether a chunk may be loaded before the update of its page, beside those of another."""
        return max(len(self._ring), len(self._streams)) > 2

    def give_up(self, loaded: Loaded) -> None:
        """Give back what a chunk was loaded into; nobody will use it."""
        if loaded.read is not None:
            # Nobody wants these bytes any more, so nobody minds that they could not be read.
            with contextlib.suppress(Exception):
                loaded.read.wait()
        if loaded.stream is not None:
            self._streams.release(loaded.stream)
        elif loaded.frame is not None and not loaded.resident:
            self._ring.release(loaded.frame)

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
            plain = loaded.frame.tensor[: loaded.chunk.nbytes]
            with Span("decode", page.layout.key, nbytes=plain.nbytes):
                codec.decode(loaded.stream.tensor[:length], plain)
            self._streams.release(loaded.stream)
            loaded.stream = None
        elif loaded.read is None and page.state_layout.slots and not self._is_valid(page, loaded):
            # What lay in the frame before would only make the stream longer.
            loaded.frame.tensor[: loaded.chunk.nbytes].zero_()
        if self._there is not None:
            assert loaded.resident
            key = page.index, loaded.chunk.index
            loaded.there = self._there.bring(key, loaded.frame, loaded.chunk.nbytes)

    def _is_valid(self, page: Page, loaded: Loaded) -> bool:
        return (page.index, loaded.chunk.index) in self._valid

    def store(self, page: Page, name: str, loaded: Loaded, codec: StateCodec) -> Stored:
        """Begin to write a chunk's state to the file `name`; its frame goes back to the ring."""
        chunk, frame = loaded.chunk, loaded.frame
        if frame is None:
            return Stored(None, 0)
        if loaded.resident and self._keeps:
            self._dirty[page.index, chunk.index] = codec
            if self._there is not None:
                self._there.stepped((page.index, chunk.index))
            self._keep(page, loaded, None)
            return Stored(None, 0)
        stored = self._write(page, name, chunk, frame, codec)
        self._keep(page, loaded, None if page.state_layout.slots else stored.ticket)
        return stored

    def _write(
        self, page: Page, name: str, chunk: Chunk, frame: Frame, codec: StateCodec
    ) -> Stored:
        if not page.state_layout.slots:
            return Stored(self._io.write(name, chunk.split(frame.memory)), chunk.nbytes)
        stream = self._streams.acquire()
        assert stream is not None
        with Span("encode", page.layout.key, nbytes=chunk.nbytes):
            length = codec.encode(frame.tensor[: chunk.nbytes], stream.tensor)
        padded = align_up(length)
        stream.tensor[length:padded].zero_()
        offset, _ = page.state_layout.slots[chunk.index]
        stored = Stored(self._io.write(name, [(offset, stream.memory[:padded])]), length)
        self._streams.release(stream, stored.ticket)
        return stored

    def write_back(self, table: PageTable, prepare: Callable[[Plane, int], str]) -> None:
        """Write all state that `store` kept, and make it the current one of its pages.

        Args:
            table: The pages.
            prepare: Makes a slot of a plane ready for writing and returns its file.
        """
        kept: dict[int, dict[int, StateCodec]] = {}
        for (page, chunk), codec in self._dirty.items():
            kept.setdefault(page, {})[chunk] = codec
        under_way: list[tuple[Page, int, dict[int, Stored]]] = []
        for index, codecs in kept.items():
            page = table[index]
            slot = page.state.next_slot
            name = prepare(page.state, slot)
            # Where some chunks are not kept, every update has written those to this very slot.
            assert page.state.slot == slot or not self.writes(page)
            under_way.append(
                (
                    page,
                    slot,
                    {
                        i: self._write(
                            page,
                            name,
                            page.state_layout.chunks[i],
                            self._resident[index, i],
                            codec,
                        )
                        for i, codec in codecs.items()
                    },
                )
            )
        wait_for_all([s.ticket for _, _, written in under_way for s in written.values()])
        for page, slot, written in under_way:
            state, count = page.state, len(page.state_layout.chunks)
            sums, lengths = state.sums or [[]] * count, state.lengths or [0] * count
            sums = [written[i].sums if i in written else sums[i] for i in range(count)]
            lengths = [written[i].length if i in written else lengths[i] for i in range(count)]
            state.advance(slot, sums, lengths if page.state_layout.slots else [])
        self._dirty.clear()

    def _keep(self, page: Page, loaded: Loaded, ticket: Ticket | None) -> None:
        assert loaded.frame is not None
        if loaded.resident:
            self._valid.add((page.index, loaded.chunk.index))
        else:
            self._ring.release(loaded.frame, ticket)
