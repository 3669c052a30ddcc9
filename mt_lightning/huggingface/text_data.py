"""A LightningDataModule over plain text files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.cache import cache_directory
from mt_lightning.huggingface.loading import load_tokenizer
from mt_lightning.huggingface.token_file import (
    open_token_file,
    token_dtype,
    token_file_path,
    write_token_file,
)

log = logging.getLogger(__name__)

SHAKESPEARE_PATH = Path(__file__).parent / "text" / "shakespeare.txt"


class TextDataModule(LightningDataModule):
    """Serve a text as contiguous blocks of tokens that do not overlap.

    The text is tokenised once into the cache directory and mapped from there. The last blocks
    are the validation set; the training blocks are shuffled by seed and epoch alone.

    Args:
        path: a UTF-8 text file, or a folder whose `.txt` files are taken in order of their
            names; None means the Shakespeare text that comes with the package.
        tokenizer: a tokenizer, or a name or path for `load_tokenizer`.
        sequence_length: tokens per block.
        batch_size: blocks per batch.
        val_fraction: share of the blocks held out for validation, from 0 to below 1.
        num_workers: worker processes of the DataLoader.
        seed: of the order of the training blocks.
        cache_dir: where token files are kept; see `cache_directory`.

    Raises:
        ConfigError: if a number is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase = "smollm2",
        sequence_length: int = 256,
        batch_size: int = 1,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        for name, value, minimum in (
            ("sequence_length", sequence_length, 2),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < minimum:
                raise ConfigError(f"data.{name}={value} is too small; set it to {minimum} or more.")
        if not 0 <= val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction={val_fraction} is not a share; set it from 0 to below 1."
            )
        self.path = SHAKESPEARE_PATH if path is None else Path(path).expanduser()
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed
        self.cache_dir = cache_dir
        self._tokenizer_source = tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._train: TokenBlocks | None = None
        self._val: TokenBlocks | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded on first use."""
        if self._tokenizer is None:
            source = self._tokenizer_source
            self._tokenizer = (
                source
                if isinstance(source, PreTrainedTokenizerBase)
                else load_tokenizer(source, cache_dir=self.cache_dir)
            )
        return self._tokenizer

    def prepare_data(self) -> None:
        """Tokenise the text into the cache, if it is not there."""
        destination = self._token_file()
        if not destination.exists():
            log.info("Tokenising %s ...", self.path)
            write_token_file(self._files(), self.tokenizer, destination)

    def setup(self, stage: str | None = None) -> None:
        """Map the token file and split its blocks.

        Raises:
            ConfigError: if the text is missing, empty or too short.
        """
        self.prepare_data()
        path, dtype = self._token_file(), token_dtype(self.tokenizer)
        num_tokens = path.stat().st_size // dtype.itemsize
        num_blocks = num_tokens // self.sequence_length
        num_val_blocks = round(num_blocks * self.val_fraction)
        num_needed = 1
        if self.val_fraction > 0:
            num_val_blocks = max(1, num_val_blocks)
            num_needed = 2
        if num_tokens == 0:
            raise ConfigError(
                f"data.path={str(self.path)!r} is empty: it gives no token. "
                "Set data.path (TextDataModule(path=...)) to a file with text in it."
            )
        if num_blocks < num_needed:
            raise ConfigError(
                f"data.path={str(self.path)!r} gives {num_tokens} tokens, but "
                f"{num_needed} block(s) of {self.sequence_length} tokens are needed"
                f"{' (one to train, one to validate)' if num_needed == 2 else ''}. Give a longer "
                f"text or set data.sequence_length={max(2, num_tokens // num_needed)} or less."
            )
        num_train_blocks = num_blocks - num_val_blocks
        self._train = TokenBlocks(path, dtype, self.sequence_length, 0, num_train_blocks)
        self._val = TokenBlocks(path, dtype, self.sequence_length, num_train_blocks, num_blocks)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the training blocks in an order fixed by seed and epoch."""
        assert self._train is not None
        return self._loader(self._train, sampler=EpochShuffle(len(self._train), self.seed))

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """Return the validation blocks in order; nothing if `val_fraction` is 0."""
        assert self._val is not None
        return self._loader(self._val) if len(self._val) else []

    def _loader(
        self, blocks: TokenBlocks, sampler: Sampler[int] | None = None
    ) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            blocks,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _token_file(self) -> Path:
        folder = cache_directory(self.cache_dir) / "tokens"
        return token_file_path(self._files(), self.tokenizer, folder)

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        files = sorted(self.path.glob("*.txt")) if self.path.is_dir() else []
        if not files:
            found = "has no .txt file" if self.path.is_dir() else "does not exist"
            raise ConfigError(
                f"data.path={str(self.path)!r} {found} (looked from {Path.cwd()}). "
                "Set data.path (TextDataModule(path=...)) to a text file or a folder of them."
            )
        return files


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
