"""How optimizer state is kept: between the bytes of a chunk and what an update reads."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class StateCodec(ABC):
    """Turns a stretch of stored bytes into the tensor that an optimizer steps, and back."""

    name: str
    exact: bool
    """Whether `encode(decode(x))` and `decode(encode(t))` keep every bit."""

    @abstractmethod
    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return how many bytes `numel` values take on disk."""

    @abstractmethod
    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values held by `stored` (uint8, 1-D) as a 1-D tensor of `dtype`."""

    @abstractmethod
    def encode(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Write `values` (1-D) into `stored` (uint8, 1-D)."""


class RawCodec(StateCodec):
    """Keep state as the optimizer made it; decoding is a view."""

    name = "raw"
    exact = True

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the plain size."""
        return numel * dtype.itemsize

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a view."""
        return stored.view(dtype)

    def encode(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Copy `values`, unless they already are that memory."""
        target = stored.view(values.dtype)
        if target.data_ptr() != values.data_ptr():
            target.copy_(values.reshape(-1))
