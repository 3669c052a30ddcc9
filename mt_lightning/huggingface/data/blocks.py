"""Blocks of a token file, and an order that depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from mt_lightning.huggingface.token_file import open_token_file


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Some blocks of a token file, mapped from disk.

    Args:
        path: the token file.
        dtype: dtype of its ids.
        sequence_length: tokens per block.
        first: index of the first block.
        last: index after the last block.
    """

    def __init__(
        self, path: Path, dtype: np.dtype, sequence_length: int, first: int, last: int
    ) -> None:
        self._arguments = (path, dtype, sequence_length, first, last)
        tokens = open_token_file(path, dtype)[first * sequence_length : last * sequence_length]
        self._blocks = tokens.reshape(-1, sequence_length)

    def __reduce__(self) -> tuple[type[TokenBlocks], tuple[Any, ...]]:
        """Travel to a worker process as a path: a mapped array would be copied."""
        return TokenBlocks, self._arguments

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `input_ids` (int64 `[sequence]`) of one block."""
        return {"input_ids": torch.from_numpy(self._blocks[index].astype(np.int64))}


class EpochShuffle(Sampler[int]):
    """A random order that depends on seed and epoch only, never on the global RNG.

    Lightning calls `set_epoch` before each epoch.

    Args:
        num_samples: number of samples to order.
        seed: of the order.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        """Yield every index once."""
        order = np.random.default_rng((self._seed, self._epoch)).permutation(self._num_samples)
        return iter(order.tolist())
