"""Optimizer state as plain tensors in a mapping, whatever form it has on disk."""

from __future__ import annotations

from contextvars import ContextVar

from mt_lightning.engine.workspace import Workspace
from mt_lightning.optim.codec import StateCodec
from mt_lightning.optim.compressed_adamw import LOSSLESS
from mt_lightning.pages.sizes import ALIGN_BYTES, align_up
from mt_lightning.pages.table import Page
from mt_lightning.tiers.coding import CodedChunk, CodedPlane, Coding
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.mapping import PrivateMapping
from mt_lightning.tiers.origins import Seal
from mt_lightning.tiers.store import Store

AS_STORED: ContextVar[bool] = ContextVar("as_stored", default=False)
"""Whether a checkpoint that keeps state as it is on disk asks an attached engine for it."""
_COPY_SLOT = 2
"""The slot number of a plain copy; 0 and 1 are those of the coded plane."""


class PlainState:
    """Maps state planes; coded ones are expanded into a file without a name.

    Args:
        store: Where they lie.
        io: I/O threads.
        workspace: Lends frames.
        as_stored: Whether tensors without data stand for coded state; see the note on them.
    """

    def __init__(
        self, store: Store, io: IOQueue, workspace: Workspace, *, as_stored: bool = False
    ) -> None:
        self._as_stored = as_stored
        self._store = store
        self._io = io
        self._workspace = workspace

    def map(self, page: Page, codec: StateCodec) -> PrivateMapping | CodedPlane:
        """Map the current state of `page`, laid out by the tensors of its state layout.

        Raises:
            StorageError: There is no room on disk for the plain form of coded state.
        """
        if not page.state_layout.slots:
            mapping = self._store.map_private(page.state.file, 0, page.state.nbytes)
            pieces = [chunk.pieces for chunk in page.state_layout.chunks]
            mapping.views.seal = Seal.of_chunks(pieces, page.state.sums)
            return mapping
        if self._as_stored:
            return self._coded(page)
        name = f"{page.state.key}.{_COPY_SLOT}"
        self._store.create(name, page.state_layout.plain_bytes)
        try:
            self._expand(page, name, codec)
            # Without its name the copy lives as long as the mapping.
            return self._store.map_private(name, 0, page.state_layout.plain_bytes)
        finally:
            self._store.delete(name)

    def _coded(self, page: Page) -> CodedPlane:
        layout, plane = page.state_layout, page.state
        mapping = self._store.map_private(plane.file, 0, plane.nbytes)
        chunks = tuple(
            CodedChunk(offset, length, chunk.pieces)
            for chunk, (offset, _), length in zip(
                layout.chunks, layout.slots, plane.lengths, strict=True
            )
        )
        pieces = [[(c.offset, align_up(c.length))] if c.length else [] for c in chunks]
        mapping.views.seal = Seal.of_chunks(pieces, plane.sums)
        return CodedPlane(
            mapping.tensor(0, ALIGN_BYTES), Coding(LOSSLESS, layout.plain_bytes, chunks)
        )

    def _expand(self, page: Page, name: str, codec: StateCodec) -> None:
        layout, plane = page.state_layout, page.state
        with (
            self._workspace.plain(layout.largest_chunk_bytes) as plain,
            self._workspace.stream(layout.largest_slot_bytes) as stream,
        ):
            for chunk in layout.chunks:
                if not chunk.nbytes:
                    continue
                offset, _ = layout.slots[chunk.index]
                length = plane.lengths[chunk.index]
                coded = [(offset, stream.memory[: align_up(length)])]
                self._io.read(plane.file, coded, sums=plane.sums[chunk.index]).wait()
                codec.decode(stream.tensor[:length], plain.tensor[: chunk.nbytes])
                self._io.write(name, chunk.split(plain.memory)).wait()
