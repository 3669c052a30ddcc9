"""The manifest of a linked checkpoint: which files it consists of, and what must be in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.coding import Coding

FORMAT = "megatrain-linked-checkpoint"
FORMAT_VERSION = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}


@dataclass(frozen=True)
class PageFile:
    """A linked page file.

    Attributes:
        directory: Index of the directory it lies in.
        nbytes: Bytes of its payload.
        pieces: Offset and length of each range of the payload that has checksums.
        sums: The xxh3_64 of each block of each piece, in order.
        coding: How it expands to what tensors are laid out in; None where they lie in it.
    """

    directory: int
    nbytes: int
    pieces: tuple[tuple[int, int], ...]
    sums: tuple[int, ...]
    coding: Coding | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks that have a checksum."""
        return sum(-(-length // BLOCK_BYTES) for _, length in self.pieces)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield offset in the payload, length and checksum of each block."""
        at = 0
        for offset, length in self.pieces:
            for start in range(0, length, BLOCK_BYTES):
                yield offset + start, min(BLOCK_BYTES, length - start), self.sums[at]
                at += 1


@dataclass(frozen=True)
class TensorPlace:
    """A tensor that lies in a page file.

    Attributes:
        file: Name of the file.
        offset: First byte in the payload, or in what it expands to.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides in elements.
    """

    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor reaches over; it has elements."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a linked checkpoint consists of.

    Attributes:
        checkpoint_id: Names its folders.
        home: Where the manifest was written.
        directories: The offload directories: relative to the manifest, and as they were.
        files: The page files, by name.
        tensors: The tensors in them; the rest refers to them by number.
        rest: Name, bytes and xxh3_64 of the file with everything else, in the first directory.
        folders: The folder in each directory; empty before they were looked for.
    """

    checkpoint_id: str
    home: str
    directories: tuple[tuple[str, str], ...]
    files: Mapping[str, PageFile]
    tensors: tuple[TensorPlace, ...]
    rest: tuple[str, int, int]
    folders: tuple[Path, ...] = field(default=(), compare=False)

    def path_of(self, name: str) -> Path:
        """Return where a page file lies."""
        return self.folders[self.files[name].directory] / name

    @property
    def rest_path(self) -> Path:
        """Where everything else lies."""
        return self.folders[0] / self.rest[0]

    def to_bytes(self) -> bytes:
        """Encode the manifest."""
        content = {
            "id": self.checkpoint_id,
            "home": self.home,
            "directories": [list(pair) for pair in self.directories],
            "files": {
                name: [
                    file.directory,
                    file.nbytes,
                    [list(piece) for piece in file.pieces],
                    "".join(f"{value:016x}" for value in file.sums),
                    _coding_to_json(file.coding),
                ]
                for name, file in self.files.items()
            },
            "tensors": [
                [t.file, t.offset, str(t.dtype).removeprefix("torch."), t.shape, t.stride]
                for t in self.tensors
            ],
            "rest": [self.rest[0], self.rest[1], f"{self.rest[2]:016x}"],
        }
        document = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "sum": f"{sum_of(content):016x}",
            "content": content,
        }
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _coding_to_json(coding: Coding | None) -> list[Any] | None:
    if coding is None:
        return None
    chunks = [[chunk.offset, chunk.length, chunk.pieces] for chunk in coding.chunks]
    return [coding.codec, coding.plain_bytes, chunks]


def sum_of(content: object) -> int:
    """Return the xxh3_64 of JSON data, however it was written."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_intdigest(text.encode())
