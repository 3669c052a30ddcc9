"""Where the checksummed pieces of each state plane lie, for those who have no model to ask.

A commit holds the checksums of what was written, in order. Which bytes they are of depends on how
the plane is cut into chunks, and that on the optimizer; so it is written down once for each fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mt_lightning.engine.kept import keep
from mt_lightning.pages.sizes import align_up
from mt_lightning.pages.table import PageTable
from mt_lightning.tiers.store import Store

PIECES_KEY = "pieces"
"""The key in a commit's `meta` with the name of the file."""

Pieces = list[list[tuple[int, int]]]
"""For each chunk, offset and length of its pieces; of a coded plane, of its slot."""


def keep_pieces(store: Store, table: PageTable) -> str:
    """Write down how the state planes are cut; return the name of the file."""
    planes: dict[str, Any] = {}
    for page in table:
        layout = page.state_layout
        if page.state.nbytes:
            chunks = [[slot] for slot in layout.slots] or [list(c.pieces) for c in layout.chunks]
            planes[page.state.key] = {
                "nbytes": page.state.nbytes,
                "coded": bool(layout.slots),
                "chunks": chunks,
            }
    return keep(store, json.dumps(planes, separators=(",", ":")).encode())


def written_pieces(
    plane: Mapping[str, Any], lengths: list[int] | None
) -> Iterator[tuple[int, int]]:
    """Yield offset and length of every piece that a commit has checksums of.

    Args:
        plane: What was written down for the plane.
        lengths: Of a coded plane, the bytes of each chunk's stream.

    Raises:
        ValueError: The lengths are not of this plane.
    """
    chunks = plane["chunks"]
    if plane["coded"]:
        if lengths is None or len(lengths) != len(chunks):
            raise ValueError("the lengths of the streams do not fit")
        for chunk, length in zip(chunks, lengths, strict=True):
            if length:
                yield chunk[0][0], align_up(length)
    else:
        for chunk in chunks:
            yield from ((offset, length) for offset, length in chunk)
