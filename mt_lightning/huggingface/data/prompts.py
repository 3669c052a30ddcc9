"""Beginnings of samples, for a model to continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mt_lightning.huggingface.batch_checks import IGNORED_LABEL

_NUM_BEGINNING = 24


def beginnings(dataset: Any, count: int) -> list[list[int]]:
    """Return what comes before the first trained token of some rows, as tokens.

    Of a row that is trained from its beginning, such as a block of a text, some first tokens.

    Args:
        dataset: Rows with `input_ids`, and `labels` and `position_ids` where there are any.
        count: How many rows; they are spread over the data.
    """
    count = min(count, len(dataset))
    return [_beginning(dataset[i * len(dataset) // count]) for i in range(count)]


def _beginning(row: dict[str, Tensor]) -> list[int]:
    ids: list[int] = row["input_ids"].tolist()
    labels: Sequence[int] = row["labels"].tolist() if "labels" in row else ids
    if "position_ids" in row:  # of several samples the first
        ends = (row["position_ids"][1:] == 0).nonzero()
        last = int(ends[0]) + 1 if len(ends) else len(ids)
        ids, labels = ids[:last], labels[:last]
    trained = [i for i, label in enumerate(labels) if label != IGNORED_LABEL]
    given = trained[0] if trained else len(ids)
    # The first token of a packed sample is no label, whatever it is.
    return ids[:given] if given > 1 else ids[: max(1, min(_NUM_BEGINNING, len(ids) // 2))]
