"""Optimizer state as plain tensors in a mapping, whatever form it has on disk."""

from __future__ import annotations

from mt_lightning.engine.workspace import Workspace
from mt_lightning.optim.codec import StateCodec
from mt_lightning.pages.sizes import align_up
from mt_lightning.pages.table import Page
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.mapping import PrivateMapping
from mt_lightning.tiers.origins import Seal
from mt_lightning.tiers.store import Store

_COPY_SLOT = 2
"""The slot number of a plain copy; 0 and 1 are those of the coded plane."""


class PlainState:
    """Maps state planes; coded ones are expanded into a file without a name."""

    def __init__(self, store: Store, io: IOQueue, workspace: Workspace) -> None:
        self._store = store
        self._io = io
        self._workspace = workspace

    def map(self, page: Page, codec: StateCodec) -> PrivateMapping:
        """Map the current state of `page`, laid out by the tensors of its state layout.

        Raises:
            StorageError: There is no room on disk for the plain form of coded state.
        """
        if not page.state_layout.slots:
            mapping = self._store.map_private(page.state.file, 0, page.state.nbytes)
            pieces = [chunk.pieces for chunk in page.state_layout.chunks]
            mapping.views.seal = Seal.of_chunks(pieces, page.state.sums)
            return mapping
        name = f"{page.state.key}.{_COPY_SLOT}"
        self._store.create(name, page.state_layout.plain_bytes)
        try:
            self._expand(page, name, codec)
            # Without its name the copy lives as long as the mapping.
            return self._store.map_private(name, 0, page.state_layout.plain_bytes)
        finally:
            self._store.delete(name)

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
