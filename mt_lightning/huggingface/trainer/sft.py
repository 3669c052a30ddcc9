"""What TRL's SFTConfig adds to TrainingArguments: samples of text, cut, padded and labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.batch_checks import IGNORED_LABEL
from mt_lightning.huggingface.data.batches import SampleCollator
from mt_lightning.huggingface.data.encoding import Encoder
from mt_lightning.huggingface.data.kinds import RAW_COLUMNS, kind_of

MAPPED: dict[str, str] = {
    "dataset_text_field": "the column that is tokenised, where samples have no input_ids",
    "max_length": "tokens after which samples are cut",
    "completion_only_loss": "None: tokens of a prompt are no labels, nor those whose "
    "completion_mask is 0; False: they are",
    "assistant_only_loss": "of conversations, only the answers of the assistant are labels",
    "eos_token": "ends each text",
    "pad_token": "fills batches up",
    "pad_to_multiple_of": "fills batches up to a multiple",
    "packing": "samples of texts, conversations and completions share rows of max_length tokens, "
    "which is proved to keep them apart when training starts",
    "eval_packing": "the same of data to evaluate on; None: as packing says",
    "dataset_num_proc": "texts are tokenised batch by batch, without processes of their own",
}
"""Fields of SFTConfig that are followed; the others are refused when they are not the default."""


def is_sft(args: TrainingArguments) -> bool:
    """Return whether arguments are an SFTConfig of TRL."""
    return any(base.__name__ == "SFTConfig" for base in type(args).__mro__)


def columns(args: TrainingArguments) -> list[str]:
    """Return the columns that the collator reads, besides those of the model."""
    text: str = getattr(args, "dataset_text_field", "text")
    return [text, "completion_mask", *RAW_COLUMNS]


def encoder_for(names: Sequence[str], args: Any, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return what makes samples of rows with these columns, with the labels that TRL gives them.

    Args:
        names: The columns.
        args: An SFTConfig.
        tokenizer: Tokenises.

    Raises:
        ConfigError: Only completions shall be labels, and there is none.
    """
    kind = kind_of(names)
    if kind != "completion":
        _check_completion_only(args)
    answers = kind == "messages" and getattr(args, "assistant_only_loss", False)
    completion = kind == "completion" and args.completion_only_loss is not False
    return Encoder(
        tokenizer,
        loss_on="auto" if answers or completion else "all",
        max_tokens=args.max_length,
        eos_id=_id_of(tokenizer, args, "eos_token", tokenizer.eos_token_id),
    )


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
        eos_id = _id_of(tokenizer, args, "eos_token", tokenizer.eos_token_id)
        pad_id = _id_of(tokenizer, args, "pad_token", tokenizer.pad_token_id)
        pad_id = eos_id if pad_id is None else pad_id
        if pad_id is None:
            raise ConfigError("the tokenizer has no pad_token and no eos_token; set pad_token.")
        self._pad_id = pad_id
        self._packed = SampleCollator(
            tokenizer, getattr(args, "pad_to_multiple_of", None) or 1, pad_with=pad_id
        )
        self._encoders: dict[tuple[str, ...], Encoder] = {}

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return `input_ids`, `attention_mask` and `labels`, int64 `[batch, sequence]`.

        Of packed rows `position_ids` in place of a mask.
        """
        if "position_ids" in samples[0]:
            return self._packed(samples)
        rows = [self._row(sample) for sample in samples]
        length = max(len(ids) for ids, _ in rows)
        multiple = getattr(self._args, "pad_to_multiple_of", None)
        if multiple:
            length = -(-length // multiple) * multiple
        shape = (len(rows), length)
        batch = {
            "input_ids": torch.full(shape, self._pad_id),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, IGNORED_LABEL),
        }
        for i, (ids, labels) in enumerate(rows):
            batch["input_ids"][i, : len(ids)] = torch.tensor(ids)
            batch["attention_mask"][i, : len(ids)] = 1
            batch["labels"][i, : len(ids)] = torch.tensor(labels)
        return batch

    def _row(self, sample: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        if "input_ids" not in sample:
            return self._encoded(sample)
        ids = [int(each) for each in sample["input_ids"]]
        labels = [int(each) for each in sample.get("labels", ids)]
        mask = sample.get("completion_mask")
        if mask is not None and self._args.completion_only_loss is not False:
            pairs = zip(labels, mask, strict=True)
            labels = [label if keep else IGNORED_LABEL for label, keep in pairs]
        elif mask is None:
            _check_completion_only(self._args)
        most = self._args.max_length
        return (ids, labels) if most is None else (ids[:most], labels[:most])

    def _encoded(self, sample: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        args, field = self._args, self._args.dataset_text_field
        row = {**sample, "text": sample[field]} if field in sample else sample
        names = tuple(row)
        if names not in self._encoders:
            self._encoders[names] = encoder_for(names, args, self.tokenizer)
        encoder = self._encoders[names]
        encoded = encoder.encode(row, "a sample")
        pairs = zip(encoded.ids, encoded.trained, strict=True)
        return encoded.ids, [token if keep else IGNORED_LABEL for token, keep in pairs]


def _check_completion_only(args: Any) -> None:
    if getattr(args, "completion_only_loss", None):
        raise ConfigError(
            "completion_only_loss=True, and a sample has no prompt and completion, nor a "
            "completion_mask. Give it one, or set completion_only_loss=None."
        )


def _id_of(tokenizer: PreTrainedTokenizerBase, args: Any, field: str, default: Any) -> int | None:
    token = getattr(args, field, None)
    if token is None:
        return default
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == getattr(tokenizer, "unk_token_id", None):
        raise ConfigError(f"{field}={token!r} is no token of the tokenizer.")
    assert isinstance(found, int)
    return found
