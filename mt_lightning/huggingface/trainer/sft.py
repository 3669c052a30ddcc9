"""What TRL's SFTConfig adds to TrainingArguments: samples of text, cut, padded and labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from mt_lightning.errors import ConfigError

MAPPED: dict[str, str] = {
    "dataset_text_field": "the column that is tokenised, where samples have no input_ids",
    "max_length": "tokens after which samples are cut",
    "completion_only_loss": "tokens of the prompt are no labels: those whose completion_mask is 0",
    "eos_token": "ends each text",
    "pad_token": "fills batches up",
    "pad_to_multiple_of": "fills batches up to a multiple",
    "dataset_num_proc": "texts are tokenised batch by batch, without processes of their own",
}
"""Fields of SFTConfig that are followed; the others are refused when they are not the default."""

_UNPREPARED = ("messages", "prompt", "completion", "conversations", "images")
_IGNORED = -100


def is_sft(args: TrainingArguments) -> bool:
    """Return whether arguments are an SFTConfig of TRL."""
    return any(base.__name__ == "SFTConfig" for base in type(args).__mro__)


def columns(args: TrainingArguments) -> list[str]:
    """Return the columns that the collator reads, besides those of the model."""
    text: str = getattr(args, "dataset_text_field", "text")
    return [text, "completion_mask", *_UNPREPARED]


class TextCollator:
    """Makes batches as TRL's SFTTrainer does for plain language modelling.

    Args:
        args: An SFTConfig.
        tokenizer: Tokenises and pads.

    Raises:
        ConfigError: There is no tokenizer, or nothing to pad with.
    """

    def __init__(self, args: Any, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ConfigError(
                "SFTConfig needs a tokenizer to pad with: give mt.Trainer(processing_class=...)."
            )
        self._args = args
        self.tokenizer = tokenizer
        self._eos_id = self._id_of("eos_token", tokenizer.eos_token_id)
        pad_id = self._id_of("pad_token", tokenizer.pad_token_id)
        pad_id = self._eos_id if pad_id is None else pad_id
        if pad_id is None:
            raise ConfigError("the tokenizer has no pad_token and no eos_token; set pad_token.")
        self._pad_id = pad_id

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask` and `labels`, int64 `[batch, sequence]`."""
        rows = [self._row(sample) for sample in samples]
        length = max(len(ids) for ids, _ in rows)
        multiple = getattr(self._args, "pad_to_multiple_of", None)
        if multiple:
            length = -(-length // multiple) * multiple
        shape = (len(rows), length)
        batch = {
            "input_ids": torch.full(shape, self._pad_id),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, _IGNORED),
        }
        for i, (ids, labels) in enumerate(rows):
            batch["input_ids"][i, : len(ids)] = torch.tensor(ids)
            batch["attention_mask"][i, : len(ids)] = 1
            batch["labels"][i, : len(ids)] = torch.tensor(labels)
        return batch

    def _row(self, sample: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        ids = self._ids(sample)
        labels = [int(each) for each in sample.get("labels", ids)]
        mask = sample.get("completion_mask")
        if mask is not None and self._args.completion_only_loss is not False:
            pairs = zip(labels, mask, strict=True)
            labels = [label if keep else _IGNORED for label, keep in pairs]
        elif mask is None and getattr(self._args, "completion_only_loss", None):
            raise ConfigError(
                "completion_only_loss=True, and a sample has no completion_mask. Tokenise prompts "
                "and completions with one, or set completion_only_loss=None."
            )
        most = self._args.max_length
        return (ids, labels) if most is None else (ids[:most], labels[:most])

    def _ids(self, sample: Mapping[str, Any]) -> list[int]:
        if "input_ids" in sample:
            return [int(each) for each in sample["input_ids"]]
        name = self._args.dataset_text_field
        if name not in sample:
            there = ", ".join(sample)
            unprepared = [each for each in _UNPREPARED if each in sample]
            hint = f"{', '.join(unprepared)}: apply the chat template first. " * bool(unprepared)
            raise ConfigError(
                f"a sample has neither input_ids nor {name!r} (dataset_text_field), but {there}. "
                f"{hint}Tokenise the data, or name the column of the text."
            )
        ids = self.tokenizer(sample[name])["input_ids"]
        if self._eos_id is not None and (not ids or ids[-1] != self._eos_id):
            ids = [*ids, self._eos_id]
        return ids

    def _id_of(self, field: str, default: int | None) -> int | None:
        token = getattr(self._args, field, None)
        if token is None:
            return default
        found = self.tokenizer.convert_tokens_to_ids(token)
        if found is None or found == getattr(self.tokenizer, "unk_token_id", None):
            raise ConfigError(f"{field}={token!r} is no token of the tokenizer.")
        return found
