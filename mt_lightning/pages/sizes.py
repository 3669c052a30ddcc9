"""The two sizes everything on disk is built from."""

from __future__ import annotations

ALIGN_BYTES = 4096
"""Offsets and lengths of all page I/O are multiples of this, so that O_DIRECT accepts them."""

BLOCK_BYTES = 4 << 20
"""One checksum covers one block; an I/O operation moves at most one block."""


def align_up(num_bytes: int, alignment: int = ALIGN_BYTES) -> int:
    """Round `num_bytes` up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


def align_down(num_bytes: int, alignment: int = ALIGN_BYTES) -> int:
    """Round `num_bytes` down to a multiple of `alignment`."""
    return num_bytes // alignment * alignment
