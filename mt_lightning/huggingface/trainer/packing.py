"""Packed rows for `packing=True` of TRL's SFTConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.cache import cache_directory
from mt_lightning.huggingface.data.batches import Samples, StreamedSamples, sample_lengths
from mt_lightning.huggingface.data.packs import best_fit
from mt_lightning.huggingface.data.sources import Rows
from mt_lightning.huggingface.data.store import open_store
from mt_lightning.huggingface.trainer.sft import encoder_for, is_sft


def is_packing(args: Any, *, evaluates: bool) -> bool:
    """Return whether an SFTConfig asks for packed rows.

    Args:
        args: Arguments of a Trainer.
        evaluates: Whether the rows are there to evaluate on.
    """
    if not is_sft(args):
        return False
    asked = getattr(args, "packing", False)
    own = getattr(args, "eval_packing", None)
    return bool(asked if own is None or not evaluates else own)


def packed(
    name: str, dataset: Any, args: Any, tokenizer: PreTrainedTokenizerBase
) -> Dataset[dict[str, Any]]:
    """Return texts, conversations or completions as rows that several of them share.

    Each is cut to `max_length`, the tokens of a row. They are tokenised into the cache, as those of
    `mt.TextDataModule` are.

    Args:
        name: What the data set is called in messages.
        dataset: Rows that are not tokenised yet.
        args: An SFTConfig.
        tokenizer: Tokenises.

    Raises:
        ConfigError: Rows are tokenised, or nothing says how long they may be.
    """
    if args.max_length is None:
        raise ConfigError(
            "packing=True, and max_length=None: set max_length to the tokens of a row."
        )
    rows = Rows(dataset, name)
    names = rows.columns if rows.has_length else _columns_of_stream(dataset)
    if "input_ids" in names:
        raise ConfigError(
            f"packing=True, and {name} is tokenised (it has input_ids): where its samples end is "
            "not known. Give texts, conversations or prompts with completions, or pack with "
            "mt.TextDataModule(packing=True)."
        )
    field = args.dataset_text_field
    columns = {"text": field} if field != "text" and field in names else {}
    encoder = encoder_for(["text" if each == field else each for each in names], args, tokenizer)
    if not rows.has_length:
        return StreamedSamples(rows, columns, encoder, args.max_length)
    store, _ = open_store(rows, columns, encoder, cache_directory(None) / "samples")
    return Samples(store, best_fit(np.asarray(sample_lengths(store)), args.max_length), packed=True)


def _columns_of_stream(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None)
    if names:
        return list(names)
    for row in dataset:
        return list(row) if isinstance(row, Mapping) else []
    return []
