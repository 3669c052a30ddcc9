"""Samples as data sets of torch, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.batch_checks import IGNORED_LABEL
from mt_lightning.huggingface.data.encoding import Encoded, Encoder, Facts
from mt_lightning.huggingface.data.sources import Rows
from mt_lightning.huggingface.data.store import Store, check_facts

_NUM_CHECKED = 64

Sample = dict[str, Tensor]


class Samples(Dataset[Sample]):
    """Some samples of a store, one or several to a row.

    Several samples of a row are told apart by their positions, which begin at 0 with each; the
    first token of each is no label.

    Args:
        store: Holds them.
        rows: The samples of each row.
        packed: Whether rows have positions.
    """

    def __init__(self, store: Store, rows: Sequence[Sequence[int]], *, packed: bool) -> None:
        self._arguments = (store, rows, packed)
        self.packed = packed
        self.rows = rows
        self._tokens, self._trained = store.tokens(), store.trained()
        self._starts = store.starts()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a worker process as a path: mapped arrays would be copied."""
        return _open_samples, self._arguments

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Return `input_ids` and `labels` of a row, and `position_ids` of a packed one.

        All are int64 `[sequence]`.
        """
        parts = [self._sample(number) for number in self.rows[index]]
        return joined(parts) if self.packed else labelled(*parts[0])

    def _sample(self, number: int) -> tuple[Tensor, Tensor]:
        span = slice(int(self._starts[number]), int(self._starts[number + 1]))
        ids = torch.from_numpy(self._tokens[span].astype(np.int64))
        return ids, torch.from_numpy(self._trained[span].astype(np.bool_))


def _open_samples(store: Store, rows: Sequence[Sequence[int]], packed: bool) -> Samples:
    return Samples(store, rows, packed=packed)


class StreamedSamples(IterableDataset[Sample]):
    """Samples of a data set without a length, tokenised as they come.

    Args:
        rows: The data set.
        columns: Our name of a column to its name there.
        encoder: Makes samples of rows.
        capacity: Tokens of a packed row; None where rows are single samples.
    """

    def __init__(
        self, rows: Rows, columns: Mapping[str, str], encoder: Encoder, capacity: int | None
    ) -> None:
        self.packed = capacity is not None
        self._rows = rows
        self._columns = columns
        self._encoder = encoder
        self._capacity = capacity

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch comes, if it wants to know."""
        if hasattr(self._rows.source, "set_epoch"):
            self._rows.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample]:
        """Yield rows; packed ones take samples in their order while they fit."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ConfigError(
                f"data.num_workers={worker.num_workers}, and the data set has no length: each "
                "worker would give all of it. Set data.num_workers to 0 or 1."
            )
        parts: list[tuple[Tensor, Tensor]] = []
        room = 0
        for sample in self._encoded():
            part = torch.tensor(sample.ids), torch.tensor(sample.trained)
            if self._capacity is None:
                yield labelled(*part)
                continue
            if parts and len(sample.ids) > room:
                yield joined(parts)
                parts = []
            room = (room if parts else self._capacity) - len(sample.ids)
            parts.append(part)
        if parts:
            yield joined(parts)

    def _encoded(self) -> Iterator[Encoded]:
        facts, kind = Facts(), None
        for where, row in self._rows:
            sample = self._encoder.kept(row, self._columns, where, facts)
            if kind is None:
                kind = self._encoder.kind([*row, *self._columns])
            if facts.num_rows == _NUM_CHECKED:
                check_facts(facts, kind, self._encoder, self._rows.name)
            if sample is not None:
                yield sample
        if facts.num_rows < _NUM_CHECKED:
            check_facts(facts, kind or "text", self._encoder, self._rows.name)


def labelled(ids: Tensor, trained: Tensor) -> Sample:
    """Return a sample with its labels."""
    return {"input_ids": ids, "labels": ids.masked_fill(~trained, IGNORED_LABEL)}


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> Sample:
    """Return samples as one row: positions begin anew with each, and so do labels."""
    rows = [labelled(*part) for part in parts]
    for row in rows:
        row["labels"][0] = IGNORED_LABEL  # else it would be predicted from the sample before
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows]),
        "labels": torch.cat([row["labels"] for row in rows]),
        "position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in rows]),
    }


class SampleCollator:
    """Fills rows of a batch up to the longest.

    Args:
        tokenizer: Has the token to fill up with: `pad_token`, else `eos_token`. It is never a
            label, nor attended to.
        multiple: Fill up to a multiple of this.
        pad_with: The token in place of the tokenizer's.

    Raises:
        ConfigError: The tokenizer has neither.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        multiple: int = 1,
        *,
        pad_with: int | None = None,
    ) -> None:
        self._pad_id = pad_id(tokenizer) if pad_with is None else pad_with
        self._multiple = multiple

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> Sample:
        """Return `input_ids`, `labels`, and `attention_mask` or, if packed, `position_ids`.

        All are int64 `[batch, sequence]`.
        """
        lengths = [len(row["input_ids"]) for row in rows]
        shape = (len(rows), -(-max(lengths) // self._multiple) * self._multiple)
        batch = {
            "input_ids": torch.full(shape, self._pad_id),
            "labels": torch.full(shape, IGNORED_LABEL),
        }
        packed = "position_ids" in rows[0]
        if packed:
            # What fills a row up is one more sample of its own: an attention mask would hide
            # from the model that positions begin anew.
            batch["position_ids"] = torch.zeros(shape, dtype=torch.int64)
        else:
            batch["attention_mask"] = torch.zeros(shape, dtype=torch.int64)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            batch["input_ids"][i, :length] = row["input_ids"]
            batch["labels"][i, :length] = row["labels"]
            if packed:
                batch["position_ids"][i, :length] = row["position_ids"]
                batch["position_ids"][i, length:] = torch.arange(shape[1] - length)
            else:
                batch["attention_mask"][i, :length] = 1
        return batch


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token to fill rows up with.

    Raises:
        ConfigError: There is none.
    """
    known: list[Any] = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    for found in known:
        if found is not None:
            return int(found)
    raise ConfigError(
        f"the tokenizer ({type(tokenizer).__name__}, {tokenizer.name_or_path or 'no name'}) has "
        "neither a pad_token nor an eos_token, and batches have to be filled up. Set "
        "tokenizer.pad_token to one of its tokens."
    )


def sample_lengths(store: Store) -> NDArray[np.int64]:
    """Return the number of tokens of each sample of a store."""
    return np.diff(store.starts())
