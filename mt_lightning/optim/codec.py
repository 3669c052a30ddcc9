"""How optimizer state is kept on disk: as it is, coded without loss, or packed in 2-8 bits.

[Note: three ways]
raw:      the plane holds what the optimizer's own class made; it steps views of it.
lossless: the same in RAM; on disk each chunk is a stream that keeps every bit.
packed:   records of a fixed length, on disk and in RAM alike; only our kernel reads them, and
          expands them to fp32 in registers while it updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from mt_lightning.errors import ConfigError
from mt_lightning.optim import lossless
from mt_lightning.optim.compressed_adamw import LOSSLESS, CompressedAdamW
from mt_lightning.optim.packed.formats import DYNAMIC, FORMATS, choose
from mt_lightning.optim.packed.place import Place
from mt_lightning.pages.packed import Packing

COMPRESSIONS = (False, True, LOSSLESS, DYNAMIC, *FORMATS)
"""What `optimizer_compression` accepts; True means "dynamic"."""

_PACKED_CLASSES = (torch.optim.AdamW, torch.optim.Adam, CompressedAdamW)


class StateCodec(ABC):
    """How the state of one optimizer is kept.

    Attributes:
        coded: Whether chunks are streams of varying length on disk.
        words: What it is, for people.
    """

    coded = False
    words: str

    def packing(
        self, group: dict[str, Any], shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Packing | None:
        """Return how a parameter's state is packed, None where it is not.

        Args:
            group: The parameter's group.
            shape: Its shape.
            stride: Its strides; it is dense.
        """
        del group, shape, stride
        return None

    @abstractmethod
    def longest(self, num_bytes: int) -> int:
        """Return how long the stream of `num_bytes` bytes of state can be."""

    @abstractmethod
    def encode(self, plain: torch.Tensor, stream: torch.Tensor) -> int:
        """Write the stream of `plain` (uint8, 1-D) to `stream` and return its length."""

    @abstractmethod
    def decode(self, stream: torch.Tensor, plain: torch.Tensor) -> None:
        """Write what `stream` (uint8, 1-D) holds to `plain`."""


class RawCodec(StateCodec):
    """Keep state as the optimizer made it."""

    words = ""

    def longest(self, num_bytes: int) -> int:
        """Return the same number."""
        return num_bytes

    def encode(self, plain: torch.Tensor, stream: torch.Tensor) -> int:
        """Copy."""
        stream[: plain.numel()].copy_(plain)
        return plain.numel()

    def decode(self, stream: torch.Tensor, plain: torch.Tensor) -> None:
        """Copy."""
        plain.copy_(stream[: plain.numel()])


class LosslessCodec(RawCodec):
    """Keep every bit in fewer bytes."""

    coded = True
    words = "bit-lossless: every bit of it is kept"

    def longest(self, num_bytes: int) -> int:
        """Return the worst case."""
        return lossless.max_encoded(num_bytes)

    def encode(self, plain: torch.Tensor, stream: torch.Tensor) -> int:
        """Compress."""
        return lossless.encode(plain, stream)

    def decode(self, stream: torch.Tensor, plain: torch.Tensor) -> None:
        """Expand; a damaged stream raises."""
        lossless.decode(stream, plain)


class PackedCodec(RawCodec):
    """Keep Adam's state in a few bits per value.

    Args:
        name: "dynamic" or a format for every tensor, None to take each group's own `format`.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.words = "2-8 bits per value, lossy against fp32 Adam, exact as storage"
        if name in FORMATS and FORMATS[name].exact:
            self.words = "fp32, every bit of it is kept"

    def packing(
        self, group: dict[str, Any], shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Packing:
        """Choose by name and shape."""
        place = Place.of(tuple(shape), stride)
        format = choose(self.name or group["format"], place)
        return Packing(
            format=format.name,
            grain_numel=format.grain_numel(place),
            grain_bytes=format.grain_bytes(place),
            nbytes=format.state_bytes(place),
            width=place.width,
        )


def codec_for(optimizer: torch.optim.Optimizer, compression: bool | str) -> StateCodec:
    """Return how the state of `optimizer` is kept.

    Args:
        optimizer: The user's optimizer.
        compression: The option `optimizer_compression`.

    Raises:
        ConfigError: The optimizer's state cannot be kept so.
    """
    name = DYNAMIC if compression is True else compression
    if isinstance(optimizer, CompressedAdamW):
        return _own_codec(optimizer, name)
    if name is False:
        return RawCodec()
    if name == LOSSLESS:
        return LosslessCodec()
    kind = type(optimizer).__name__
    if type(optimizer) not in _PACKED_CLASSES:
        raise ConfigError(
            f"optimizer_compression={compression!r} packs the state of torch.optim.AdamW and "
            f"torch.optim.Adam, not of {kind}. Use one of these, or optimizer_compression="
            "'lossless', which keeps the state of any optimizer bit for bit."
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer_compression={compression!r} cannot pack the third state of amsgrad=True. "
            "Set amsgrad=False, or optimizer_compression='lossless'."
        )
    assert isinstance(name, str)
    return PackedCodec(name)


def _own_codec(optimizer: CompressedAdamW, name: bool | str) -> StateCodec:
    formats = {group["format"] for group in optimizer.param_groups}
    if name is not False and formats != {name}:
        raise ConfigError(
            f"optimizer_compression={name!r}, but the CompressedAdamW of configure_optimizers has "
            f"format={', '.join(sorted(map(repr, formats)))}. Set one of the two: leave "
            "optimizer_compression=False to take the optimizer's own."
        )
    if LOSSLESS in formats:
        raise ConfigError(
            "CompressedAdamW(format='lossless') is for loops without strategy='megatrain'. Use "
            "torch.optim.AdamW with optimizer_compression='lossless'."
        )
    return PackedCodec(None)
