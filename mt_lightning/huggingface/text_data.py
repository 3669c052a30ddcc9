"""A LightningDataModule over texts, conversations, and prompts with completions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import PreTrainedTokenizerBase

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.cache import cache_directory
from mt_lightning.huggingface.data.batches import (
    SampleCollator,
    Samples,
    StreamedSamples,
    sample_lengths,
)
from mt_lightning.huggingface.data.blocks import EpochShuffle, TokenBlocks
from mt_lightning.huggingface.data.encoding import Encoder, Facts, Overlong
from mt_lightning.huggingface.data.kinds import Kind, LossOn, check_columns
from mt_lightning.huggingface.data.packs import best_fit
from mt_lightning.huggingface.data.prompts import beginnings
from mt_lightning.huggingface.data.sources import (
    ROW_SUFFIXES,
    Rows,
    check_is_text,
    tables_in,
)
from mt_lightning.huggingface.data.store import Store, open_store
from mt_lightning.huggingface.loading import load_tokenizer
from mt_lightning.huggingface.token_file import token_dtype, token_file_path, write_token_file

SHAKESPEARE_PATH = Path(__file__).parent / "text" / "shakespeare.txt"
_SHAKESPEARE_PROMPTS = ("HAMLET.\nTo be, or not to be,", "JULIET.\nO Romeo,")
_TEXT_SUFFIX = ".txt"


class TextDataModule(LightningDataModule):
    """Serve a text in blocks, or samples: texts, conversations, prompts with completions.

    A text (`.txt`) is cut into contiguous blocks that do not overlap. Samples are JSON lines
    (`.jsonl`) or a data set with the column `text`, `messages`, or `prompt` and `completion`;
    each is a row of its own, or shares one with others (`packing`). Either is tokenised once into
    the cache directory and mapped from there. The last blocks or samples are the validation set;
    training rows are shuffled by seed and epoch alone. See docs/data.md.

    Args:
        path: a file, or a folder of files that are taken in order of their names: `.txt`, or
            `.jsonl`; None means `dataset`, else the Shakespeare text that comes with the package.
        tokenizer: a tokenizer, or a name or path for `load_tokenizer`.
        sequence_length: tokens per block; the longest sample, and the longest packed row.
        batch_size: rows per batch.
        val_fraction: share of the blocks or samples held out for validation, from 0 to below 1.
        num_workers: worker processes of the DataLoader.
        seed: of the order of the training rows.
        cache_dir: where tokens are kept; see `cache_directory`.
        dataset: samples in place of `path`: a data set of Hugging Face or of torch, with or
            without a length, or a list of dicts.
        val_dataset: samples to validate on, in place of `val_fraction`.
        kind: what samples are: "text", "messages", "completion", or "auto" for what fits.
        loss_on: tokens that are trained: "assistant" (answers of conversations), "completion",
            "all", or "auto" for the one that fits the samples.
        packing: whether samples share rows. It is proved at the start that the model keeps them
            apart.
        overlong: what happens to samples of more tokens than `sequence_length`: "cut", "drop" or
            "refuse".
        chat_template: in place of the tokenizer's: the text, or the path of a file.
        columns: the name in the data of a column that has another one there, as in
            `{"prompt": "question"}`.

    Raises:
        ConfigError: if a setting is out of range or contradicts another.
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
        dataset: Any = None,
        val_dataset: Any = None,
        kind: Kind | Literal["auto"] = "auto",
        loss_on: LossOn = "auto",
        packing: bool = False,
        overlong: Overlong = "cut",
        chat_template: str | os.PathLike[str] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        for name, value, minimum in (
            ("sequence_length", sequence_length, 2),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"data.{name}={value!r}: give a whole number.")
            if value < minimum:
                raise ConfigError(f"data.{name}={value} is too small; set it to {minimum} or more.")
        if not isinstance(packing, bool):
            raise ConfigError(f"data.packing={packing!r} is no switch; set it to True or False.")
        if isinstance(val_fraction, str) or not 0 <= val_fraction < 1:
            raise ConfigError(
                f"data.val_fraction={val_fraction!r} is not a share; set it from 0 to below 1."
            )
        if path is not None and dataset is not None:
            raise ConfigError(
                f"data.path={str(path)!r} and data.dataset are both given; leave one out."
            )
        self.path = SHAKESPEARE_PATH if path is None else Path(path).expanduser()
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.seed = seed
        self.cache_dir = cache_dir
        self.packing = packing
        self._sources = dataset, val_dataset
        self._settings: dict[str, Any] = {
            "kind": kind,
            "loss_on": loss_on,
            "overlong": overlong,
            "chat_template": None if chat_template is None else os.fspath(chat_template),
        }
        self._columns = dict(columns or {})
        check_columns(self._columns)
        self._tokenizer_source = tokenizer
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._train: Dataset[Any] | None = None
        self._val: Dataset[Any] | None = None
        self._collator: Callable[[Any], Any] | None = None
        self.facts: Facts | None = None
        """Counts of the samples, known after `setup`; None for blocks and without a length."""

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

    @property
    def train_dataset(self) -> Dataset[Any]:
        """The training rows, after `setup`; for `mt.Trainer(train_dataset=...)`."""
        assert self._train is not None, "call setup() first"
        return self._train

    @property
    def val_dataset(self) -> Dataset[Any] | None:
        """The validation rows, after `setup`; None if there are none."""
        return self._val

    def prompts(self, count: int) -> list[list[int]]:
        """Return tokens for a model to continue: what a few validation samples begin with.

        Of conversations and completions it is all that comes before the first trained token.
        Without validation rows they are training rows. Of data without a length there are none.

        Args:
            count: The most that are wanted.
        """
        if self._is_text and self.path == SHAKESPEARE_PATH:
            return [self.tokenizer(text)["input_ids"] for text in _SHAKESPEARE_PROMPTS[:count]]  # pyright: ignore
        dataset = self.train_dataset if self._val is None else self._val
        return [] if isinstance(dataset, IterableDataset) else beginnings(dataset, count)

    @property
    def collator(self) -> Callable[[Any], Any] | None:
        """Makes a batch of rows, after `setup`; for `mt.Trainer(data_collator=...)`."""
        return self._collator

    def prepare_data(self) -> None:
        """Tokenise a text into the cache, if it is not there."""
        if self._is_text:
            destination = self._token_file()
            if not destination.exists():
                write_token_file(self._files(), self.tokenizer, destination)

    def setup(self, stage: str | None = None) -> None:
        """Map the tokens and split them.

        Raises:
            ConfigError: if the data are missing, empty, too short, or not what they have to be.
        """
        if self._train is not None:
            return
        if self._is_text:
            self._check_no_sample_settings()
            self.prepare_data()
            self._train, self._val = self._blocks()
        else:
            self._collator = SampleCollator(self.tokenizer)
            self._train, self._val = self._samples()

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the training rows in an order fixed by seed and epoch."""
        train: Any = self.train_dataset
        if isinstance(train, IterableDataset):
            return self._loader(train)
        return self._loader(train, sampler=EpochShuffle(len(train), self.seed))

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[Any]:
        """Return the validation rows in order; nothing if there are none."""
        return [] if self._val is None else self._loader(self._val)

    def _blocks(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
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
        num_train = num_blocks - num_val_blocks
        train = TokenBlocks(path, dtype, self.sequence_length, 0, num_train)
        if not num_val_blocks:
            return train, None
        return train, TokenBlocks(path, dtype, self.sequence_length, num_train, num_blocks)

    def _samples(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        encoder = Encoder(self.tokenizer, max_tokens=self.sequence_length, **self._settings)
        source, val_source = self._sources
        rows = (
            Rows(self._files(), f"data.path={str(self.path)!r}")
            if source is None
            else Rows(source, "data.dataset")
        )
        val = None
        if val_source is not None:
            val, _ = self._read(Rows(val_source, "data.val_dataset"), encoder, 0.0)
        if not rows.has_length:
            capacity = self.sequence_length if self.packing else None
            return StreamedSamples(rows, self._columns, encoder, capacity), val
        share = 0.0 if val_source is not None else self.val_fraction
        train, held_out = self._read(rows, encoder, share, counts=True)
        return train, val if val_source is not None else held_out

    def _read(
        self, rows: Rows, encoder: Encoder, val_fraction: float, *, counts: bool = False
    ) -> tuple[Dataset[Any], Dataset[Any] | None]:
        if not rows.has_length:
            return StreamedSamples(rows, self._columns, encoder, None), None
        folder = cache_directory(self.cache_dir) / "samples"
        store, _ = open_store(rows, self._columns, encoder, folder)
        self.facts = store.facts if counts else self.facts
        num_samples = store.facts.num_samples
        num_val = max(1, round(num_samples * val_fraction)) if val_fraction else 0
        if num_val >= num_samples:
            raise ConfigError(
                f"{rows.name} gives {num_samples} sample(s), and data.val_fraction="
                f"{val_fraction} holds {num_val} of them out: none is left to train on. Give more "
                "rows, or set data.val_fraction=0."
            )
        num_train = num_samples - num_val
        train = self._arranged(store, 0, num_train)
        return train, self._arranged(store, num_train, num_samples) if num_val else None

    def _arranged(self, store: Store, first: int, last: int) -> Samples:
        if not self.packing:
            return Samples(store, [[i] for i in range(first, last)], packed=False)
        lengths = sample_lengths(store)[first:last]
        rows = [
            [first + i for i in row] for row in best_fit(np.asarray(lengths), self.sequence_length)
        ]
        return Samples(store, rows, packed=True)

    def _loader(
        self, dataset: Dataset[Any], sampler: Sampler[int] | None = None
    ) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=self._collator,
        )

    @property
    def _is_text(self) -> bool:
        if self._sources[0] is not None:
            return False
        return self._files()[0].suffix.lower() not in ROW_SUFFIXES

    def _check_no_sample_settings(self) -> None:
        defaults = {"kind": "auto", "loss_on": "auto", "overlong": "cut", "chat_template": None}
        changed = [name for name, value in defaults.items() if self._settings[name] != value]
        changed += ["packing"] * self.packing + ["columns"] * bool(self._columns)
        changed += ["val_dataset"] * (self._sources[1] is not None)
        if changed:
            raise ConfigError(
                f"data.{changed[0]} says something of samples, and data.path={str(self.path)!r} is "
                "a text, which is cut into blocks. Leave it out, or give JSON lines "
                '({"text": "..."} in a .jsonl file).'
            )

    def _token_file(self) -> Path:
        folder = cache_directory(self.cache_dir) / "tokens"
        return token_file_path(self._files(), self.tokenizer, folder)

    def _files(self) -> list[Path]:
        if self.path.is_file():
            check_is_text(self.path)
            return [self.path]
        is_folder = self.path.is_dir()
        suffixes = (_TEXT_SUFFIX, *ROW_SUFFIXES)
        found = [p for p in sorted(self.path.glob("*")) if p.suffix.lower() in suffixes]
        texts = [p for p in found if p.suffix.lower() == _TEXT_SUFFIX]
        if texts and len(texts) < len(found):
            raise ConfigError(
                f"data.path={str(self.path)!r} has {len(texts)} text(s) and "
                f"{len(found) - len(texts)} file(s) of JSON lines. Set data.path to files of one "
                "kind."
            )
        if not found:
            tables = tables_in(self.path)
            if tables:
                check_is_text(tables[0])
            why = "has no .txt and no .jsonl file" if is_folder else "does not exist"
            raise ConfigError(
                f"data.path={str(self.path)!r} {why} (looked from {Path.cwd()}). "
                "Set data.path (TextDataModule(path=...)) to a text, to JSON lines, or to a folder "
                "of them."
            )
        return found
