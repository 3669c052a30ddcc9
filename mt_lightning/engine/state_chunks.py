"""The state plane of a page outside of updates: read and rewritten chunk by chunk, verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from mt_lightning.engine.workspace import Workspace
from mt_lightning.optim.codec import StateCodec
from mt_lightning.pages.sizes import align_up
from mt_lightning.pages.state import Chunk
from mt_lightning.pages.table import Page
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.store import Store

Change = Callable[[Chunk, Frame], None]
"""Changes the plain state of a chunk in its frame."""


class StateChunks:
    """Reads and rewrites state planes; no update runs meanwhile, and all state is on disk.

    Args:
        store: Where they lie.
        io: I/O threads.
        workspace: Lends frames.
        codec: How the state is kept.
    """

    def __init__(self, store: Store, io: IOQueue, workspace: Workspace, codec: StateCodec) -> None:
        self._store = store
        self._io = io
        self._workspace = workspace
        self._codec = codec

    def read(self, page: Page) -> Iterator[tuple[Chunk, Frame]]:
        """Yield every chunk that has state, and its plain state in a frame that is lent."""
        with ExitStack() as lent:
            frame, stream = self._frames(page, lent)
            for chunk in page.state_layout.chunks:
                if chunk.nbytes:
                    self._load(page, chunk, frame, stream)
                    yield chunk, frame

    def rewrite(self, page: Page, change: Change, *, keeps: bool) -> str:
        """Write the state of a page anew, to the slot that the last commit does not name.

        Args:
            page: The page; it has state.
            change: Called for each chunk.
            keeps: Whether frames hold the current state before they are changed, else zeros.

        Returns:
            The file written.
        """
        plane, layout = page.state, page.state_layout
        slot = plane.next_slot
        name = f"{plane.key}.{slot}"
        self._store.prepare_write(name, plane.nbytes, keep=plane.slot == slot)
        sums: list[list[int]] = []
        lengths: list[int] = []
        with ExitStack() as lent:
            frame, stream = self._frames(page, lent)
            for chunk in layout.chunks:
                if keeps and chunk.nbytes and plane.slot is not None:
                    self._load(page, chunk, frame, stream)
                else:
                    frame.tensor.zero_()
                change(chunk, frame)
                pieces = chunk.split(frame.memory)
                if stream is not None:
                    stream.tensor.zero_()
                    length = 0
                    if chunk.nbytes:
                        # No name for the view: it would outlive the frame, which is given back.
                        length = self._codec.encode(frame.tensor[: chunk.nbytes], stream.tensor)
                    lengths.append(length)
                    offset, _ = layout.slots[chunk.index]
                    pieces = [(offset, stream.memory[: align_up(length)])]
                sums.append(list(self._io.write(name, pieces).wait().sums))
        plane.advance(slot, sums, lengths)
        return name

    def _frames(self, page: Page, lent: ExitStack) -> tuple[Frame, Frame | None]:
        layout = page.state_layout
        frame = lent.enter_context(self._workspace.plain(layout.largest_chunk_bytes))
        if not layout.slots:
            return frame, None
        return frame, lent.enter_context(self._workspace.stream(layout.largest_slot_bytes))

    def _load(self, page: Page, chunk: Chunk, frame: Frame, stream: Frame | None) -> None:
        plane, sums = page.state, page.state.sums[chunk.index]
        if stream is None:
            self._io.read(plane.file, chunk.split(frame.memory), sums=sums).wait()
            return
        offset, _ = page.state_layout.slots[chunk.index]
        length = plane.lengths[chunk.index]
        self._io.read(plane.file, [(offset, stream.memory[: align_up(length)])], sums=sums).wait()
        self._codec.decode(stream.tensor[:length], frame.tensor[: chunk.nbytes])
