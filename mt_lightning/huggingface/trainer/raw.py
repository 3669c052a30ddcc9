"""Batches of rows that are not tokenised yet, and of those that are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.data.batches import SampleCollator, labelled
from mt_lightning.huggingface.data.encoding import Encoder, Facts
from mt_lightning.huggingface.data.kinds import RAW_COLUMNS

_NUM_CHECKED = 64


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Return what makes batches where the user gives no collator.

    Args:
        processing_class: A tokenizer, a feature extractor, or None.
    """
    if isinstance(processing_class, (PreTrainedTokenizerBase, SequenceFeatureExtractor)):
        padding: Any = DataCollatorWithPadding(processing_class)  # pyright: ignore
        is_text = isinstance(processing_class, PreTrainedTokenizerBase)
        return RowCollator(processing_class, padding) if is_text else padding
    return default_data_collator


class RowCollator:
    """Makes batches of texts, conversations, and prompts with completions.

    Rows with `input_ids` are left to another collator.

    Args:
        tokenizer: Tokenises and pads.
        tokenised: Makes batches of rows with `input_ids`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokenised: Callable[[list[Any]], Any]
    ) -> None:
        self.tokenizer = tokenizer
        self._tokenised = tokenised
        self._encoder = Encoder(tokenizer)
        self._facts = Facts()

    def __call__(self, rows: Sequence[Any]) -> Any:
        """Return a batch.

        Raises:
            ConfigError: Rows are no samples, or all of their tokens would be trained.
        """
        first = rows[0]
        if not isinstance(first, Mapping) or not any(name in first for name in RAW_COLUMNS):
            return self._with_padding(list(rows))
        if "input_ids" in first:
            kept = [{k: v for k, v in row.items() if k not in RAW_COLUMNS} for row in rows]
            return self._with_padding(kept)
        samples = [self._encoder.encode(row, f"row {i} of a batch") for i, row in enumerate(rows)]
        self._check(samples, self._encoder.kind(first))
        collate = SampleCollator(self.tokenizer)
        return collate(
            [labelled(torch.tensor(each.ids), torch.tensor(each.trained)) for each in samples]
        )

    def _with_padding(self, rows: list[Any]) -> Any:
        if isinstance(rows[0], Mapping) and self.tokenizer.model_input_names[0] not in rows[0]:
            self._encoder.kind(rows[0])  # says which column is missing
        if self.tokenizer.pad_token is None:
            raise ConfigError(
                f"the tokenizer ({type(self.tokenizer).__name__}, "
                f"{self.tokenizer.name_or_path or 'no name'}) has no pad_token to fill batches up "
                "with. Set tokenizer.pad_token = tokenizer.eos_token, or give a data_collator."
            )
        return self._tokenised(rows)

    def _check(self, samples: Sequence[Any], kind: str) -> None:
        facts = self._facts
        if kind == "text" or facts.num_samples >= _NUM_CHECKED:
            return
        for sample in samples:
            facts.add(sample)
        if facts.num_samples >= min(_NUM_CHECKED, 8) and facts.trained_share == 1:
            raise ConfigError(
                f"all {facts.num_tokens} tokens of the first {facts.num_samples} samples would be "
                "trained (100 %), the questions too: the chat template marks everything as an "
                "answer, or the prompts are empty. Correct the template (tokenizer.chat_template) "
                "or the rows; for plain language modelling give rows with the column 'text'."
            )
