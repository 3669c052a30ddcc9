"""What every store asserts of names, sizes and pieces."""

from __future__ import annotations

import re

from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.address import address_of
from mt_lightning.tiers.pagefile import NEW_SUFFIX

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def check_name(name: str) -> None:
    """Assert that a name is a plain file name."""
    assert _NAME.fullmatch(name), f"not a name for a store: {name!r}"
    assert not name.endswith(NEW_SUFFIX), f"not a name for a store: {name!r}"


def check_size(name: str, nbytes: int) -> None:
    """Assert that a payload has an aligned size."""
    assert nbytes > 0 == nbytes % ALIGN_BYTES, (name, nbytes)


def check_piece(name: str, size_bytes: int, offset: int, buffer: memoryview) -> memoryview:
    """Assert what direct I/O asks of a piece: offset, length and address are aligned, inside.

    Returns:
        The buffer as plain bytes.
    """
    data = buffer.cast("B")
    assert (offset | data.nbytes) % ALIGN_BYTES == 0, (name, offset, data.nbytes)
    assert 0 <= offset <= offset + data.nbytes <= size_bytes, (
        name,
        offset,
        data.nbytes,
        size_bytes,
    )
    assert address_of(data) % ALIGN_BYTES == 0, f"the buffer for {name} is not on a page boundary"
    return data
