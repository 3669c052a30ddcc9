"""Named tensors that are read piece by piece, wherever they lie."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from mt_lightning.errors import ConfigError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.address import PAGE_BYTES, address_of, advise

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Facts:
    """What is known of a tensor before it is read.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


class Weights(ABC):
    """Tensors by name, in the order in which they are best read."""

    @abstractmethod
    def facts(self) -> Mapping[str, Facts]:
        """Return dtype and shape of every tensor."""

    @abstractmethod
    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes, row by row; a piece is valid until the next one is asked for.

        Raises:
            StorageError: They cannot be read.
            CorruptPageError: They are not what was written.
        """

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the host.

        Raises:
            StorageError: It cannot be read.
            CorruptPageError: It is not what was written.
        """

    def aliases(self) -> Mapping[str, str]:
        """Return further names of tensors, each with the name that `facts` has it under."""
        return {}


class TensorWeights(Weights):
    """Tensors in RAM or, better, over mapped files.

    Args:
        tensors: The tensors; what is no tensor is left out.
        private: Whether nobody else reads or writes the mapped files' memory, as for a checkpoint
            that was loaded for this; what was read is then dropped for certain.
    """

    def __init__(self, tensors: Mapping[str, object], *, private: bool = False) -> None:
        self._private = private
        self._tensors: dict[str, torch.Tensor] = {}
        self._aliases: dict[str, str] = {}
        seen: dict[object, str] = {}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                continue
            check_plain(name, value)
            value = value.detach()
            place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            first = seen.setdefault(place, name) if value.numel() else name
            if first == name:
                self._tensors[name] = value
            else:
                self._aliases[name] = first

    @override
    def facts(self) -> Mapping[str, Facts]:
        """See `Weights.facts`."""
        return {name: Facts(t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}

    @override
    def aliases(self) -> Mapping[str, str]:
        """See `Weights.aliases`."""
        return self._aliases

    @override
    def pieces(self, name: str) -> Iterator[memoryview]:
        """See `Weights.pieces`."""
        tensor = self._tensors[name]
        data = bytes_of(tensor)
        mapped = data.nbytes > 0 and tensor.is_contiguous() and _is_file(address_of(data))
        for start in range(0, data.nbytes, BLOCK_BYTES):
            piece = data[start : start + BLOCK_BYTES]
            yield piece
            if mapped:
                _let_go(piece, self._private)

    @override
    def tensor(self, name: str) -> torch.Tensor:
        """See `Weights.tensor`."""
        return self._tensors[name].cpu()


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor that is more than elements in rows."""
    if tensor.is_sparse or tensor.is_quantized or tensor.layout != torch.strided:
        raise ConfigError(f"{name} is a sparse or quantized tensor, which safetensors cannot hold.")
    if tensor.is_meta:
        raise ConfigError(
            f"{name} is on meta: it has no values yet. Train or load the model first."
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, row by row; a copy only where they do not lie so in RAM."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _is_file(address: int) -> bool:
    """Tell whether an address lies in a mapped file."""
    with _MAPS.open() as lines:
        for line in lines:
            span, _, _, _, inode, *_ = line.split(maxsplit=5)
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= address < stop:
                return inode != "0"
    return False


def _let_go(piece: memoryview, private: bool) -> None:
    """Take the pages of mapped bytes out of RAM.

    Memory that others may have written to is only paged out, which never loses a byte.
    """
    start = address_of(piece) // PAGE_BYTES * PAGE_BYTES
    stop = (address_of(piece) + piece.nbytes) // PAGE_BYTES * PAGE_BYTES
    paging_out = getattr(mmap, "MADV_PAGEOUT", 21)
    advise(start, stop - start, mmap.MADV_DONTNEED if private else paging_out)


class RenamedWeights(Weights):
    """Some of the tensors of another `Weights`, under other names.

    Args:
        inner: The other one.
        names: New name to name there (one of `facts`); some may be missing.
    """

    def __init__(self, inner: Weights, names: Mapping[str, str]) -> None:
        self._inner = inner
        order = {name: i for i, name in enumerate(inner.facts())}
        self._names = dict(sorted(names.items(), key=lambda item: order[item[1]]))

    @override
    def facts(self) -> Mapping[str, Facts]:
        """See `Weights.facts`."""
        facts = self._inner.facts()
        return {new: facts[old] for new, old in self._names.items()}

    @override
    def pieces(self, name: str) -> Iterator[memoryview]:
        """See `Weights.pieces`."""
        return self._inner.pieces(self._names[name])

    @override
    def tensor(self, name: str) -> torch.Tensor:
        """See `Weights.tensor`."""
        return self._inner.tensor(self._names[name])
