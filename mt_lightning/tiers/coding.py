"""Payloads whose bytes are streams of a codec: how they expand, and tensors that stand for them.

[Note: tensors without data]
Expanding coded state for a checkpoint that keeps it coded would cost what linking saves. For the
time between the engine and the checkpoint such a tensor is therefore one without data (on meta):
it can be passed on and cut, and whoever tries to read it is told that it holds none. It is found
again by its storage.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CodedChunk:
    """One stream.

    Attributes:
        offset: First byte of the stream in the payload.
        length: Its bytes.
        pieces: Offset and length of the ranges of the plain plane that it expands to, in order.
    """

    offset: int
    length: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def plain_bytes(self) -> int:
        """Bytes that it expands to."""
        return sum(length for _, length in self.pieces)


@dataclass(frozen=True)
class Coding:
    """How a payload expands to the plane that tensors are laid out in.

    Attributes:
        codec: Name of the codec.
        plain_bytes: Bytes of the plain plane.
        chunks: The streams.
    """

    codec: str
    plain_bytes: int
    chunks: tuple[CodedChunk, ...]


class CodedPlane:
    """Stands for the plain plane of a coded payload.

    Args:
        shown: A tensor of a mapping of the coded payload, which tells whose it is.
        coding: How it expands.
    """

    def __init__(self, shown: torch.Tensor, coding: Coding) -> None:
        self.shown = shown
        self.coding = coding
        self._base = torch.empty(coding.plain_bytes, dtype=torch.uint8, device="meta")
        with _lock:
            _planes[self._base.untyped_storage()._cdata] = self

    @property
    def in_use(self) -> bool:
        """Whether a tensor stands for a part of it."""
        storage = self._base.untyped_storage()
        # One use by the base, one by the handle just made.
        return torch._C._storage_Use_Count(storage._cdata) > 2  # type: ignore[attr-defined]

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a tensor without data that stands for a range of the plane."""
        return self._base[offset : offset + nbytes]


_lock = threading.Lock()
_planes: dict[int, CodedPlane] = {}


def drop_unused_planes() -> None:
    """Forget the planes of checkpoints that are gone; called before new ones are made."""
    with _lock:
        for key in [key for key, plane in _planes.items() if not plane.in_use]:
            del _planes[key]


def coded_plane_of(tensor: torch.Tensor) -> CodedPlane | None:
    """Return the plane that a tensor without data stands for a part of."""
    if tensor.device.type != "meta":
        return None
    with _lock:
        return _planes.get(tensor.untyped_storage()._cdata)
