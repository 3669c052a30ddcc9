"""Which page file a tensor shows: views of mappings, found again by their address.

[Note: how a checkpoint knows what it need not write]
The tensors of a paged run's checkpoint are views of mapped page files. Whoever writes the
checkpoint is given nothing but a dictionary, possibly changed by hooks; so every mapping is
remembered here for as long as tensors of it live, with the payload it shows and the checksums that
the engine knows of it. A tensor is *of* a payload when it lies inside such a mapping, nobody has
written to its bytes, and the name still means the file that was mapped.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mt_lightning.tiers.coding import Coding, coded_plane_of
from mt_lightning.tiers.mapping import (
    LiveViews,
    PrivateMapping,
    copied_ranges,
    pagemap_is_trustworthy,
)

if TYPE_CHECKING:
    from mt_lightning.tiers.store import FileStore


@dataclass(frozen=True)
class Seal:
    """The checksums of a payload.

    Attributes:
        pieces: Offset and length of each range that was written at one go, in order.
        sums: The xxh3_64 of each block of each piece.
    """

    pieces: tuple[tuple[int, int], ...]
    sums: tuple[int, ...]

    @classmethod
    def of_chunks(
        cls, chunks: Iterable[Sequence[tuple[int, int]]], sums: Iterable[Sequence[int]]
    ) -> Seal:
        """Join the pieces and the sums of the chunks of a plane."""
        return cls(
            tuple((offset, length) for chunk in chunks for offset, length in chunk),
            tuple(value for chunk in sums for value in chunk),
        )


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie.

    Attributes:
        store: The store.
        name: The payload.
        offset: First byte of the tensor in it.
        seal: The checksums of the payload.
        coding: How the payload expands, where it is coded; the offset is then one of the plain
            plane.
    """

    store: FileStore
    name: str
    offset: int
    seal: Seal
    coding: Coding | None = None


@dataclass(frozen=True)
class _Shown:
    """A mapping of a payload.

    Attributes:
        mapping: The mapping, weak; tensors keep its memory alive, not this object.
        views: Its live tensors.
        start: Address of its first byte.
        store: Weak.
        name: The payload.
        offset: First byte of the mapping in it.
        nbytes: Length of the mapping.
    """

    mapping: weakref.ref[PrivateMapping]
    views: LiveViews
    start: int
    store: weakref.ref[FileStore]
    name: str
    offset: int
    nbytes: int

    @property
    def alive(self) -> bool:
        """Whether its payload still has its name, and somebody the mapping or a tensor of it."""
        return self.views.named and (self.mapping() is not None or self.views.any())

    def written(self, store: FileStore) -> list[tuple[int, int]]:
        """Return the ranges of the mapping that somebody has written to."""
        if pagemap_is_trustworthy():
            return copied_ranges(self.start, self.nbytes)
        now = memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.start)).cast("B")
        return store.map_private(self.name, self.offset, self.nbytes).differing_ranges(now)


_LEAST_PRUNED = 64
_lock = threading.Lock()
_shown: list[_Shown] = []
_prune_at = _LEAST_PRUNED


def remember(mapping: PrivateMapping, store: FileStore, name: str, offset: int) -> None:
    """Take note that `mapping` shows the payload `name` of `store` from `offset` on."""
    global _prune_at
    mapping.views.named = True
    shown = _Shown(
        weakref.ref(mapping),
        mapping.views,
        mapping.address,
        weakref.ref(store),
        name,
        offset,
        mapping.nbytes,
    )
    with _lock:
        _shown.append(shown)
        if len(_shown) >= _prune_at:
            _shown[:] = [each for each in _shown if each.alive]
            _prune_at = max(_LEAST_PRUNED, 2 * len(_shown))


def forget(mappings: Iterable[LiveViews]) -> None:
    """Take note that the name of these mappings' payload means another file from now on."""
    for views in mappings:
        views.named = False


class Origins:
    """The mappings that live at one moment, to look many tensors up in."""

    def __init__(self) -> None:
        with _lock:
            living = [each for each in _shown if each.alive]
        self._shown = sorted(living, key=lambda each: each.start)
        self._starts = [each.start for each in self._shown]
        self._written: dict[int, list[tuple[int, int]]] = {}

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """Return where the bytes of a tensor lie on disk; None where they lie nowhere.

        Raises:
            StorageError: The kernel does not tell which mapped bytes were written to.
        """
        plane = coded_plane_of(tensor)
        if plane is not None:
            place = self.locate(plane.shown)
            if place is None:
                return None
            offset = tensor.storage_offset() * tensor.element_size()
            return replace(place, offset=offset, coding=plane.coding)
        span = _span_bytes(tensor)
        if span is None:
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        shown = self._shown[at]
        first = address - shown.start
        store, seal = shown.store(), shown.views.seal
        if first + span > shown.nbytes or store is None or seal is None:
            return None
        if at not in self._written:
            self._written[at] = shown.written(store)
        if any(start < first + span and stop > first for start, stop in self._written[at]):
            return None
        return Place(store, shown.name, shown.offset + first, seal)


def _span_bytes(tensor: torch.Tensor) -> int | None:
    """Return how many bytes a tensor reaches over, None where that is not all there is to it."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or not tensor.numel()
        or tensor.requires_grad
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
