"""`packing=True` of an SFTConfig trains on rows that samples share, and keeps them apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import mt_lightning as mt
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import session
from tests.huggingface.data_cases import NUM_TOKENS, chat_tokenizer, conversations
from tests.huggingface.test_trainer_fields import sft
from tests.huggingface.trainer_cases import llama, losses

ROWS: list[dict[str, Any]] = [
    {"prompt": f"{i}+{i}=", "completion": f"{2 * i}" * (1 + i % 3)} for i in range(16)
]
LENGTH = 48


@pytest.fixture(autouse=True)
def session_of_its_own() -> Iterator[None]:
    yield
    session.reset()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def trainer(folder: Path, rows: Any = ROWS, **settings: Any) -> mt.Trainer:
    settings = {
        "packing": True,
        "max_length": LENGTH,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 99,
        "logging_steps": 1,
        "max_steps": 1,
        **settings,
    }
    return mt.Trainer(
        llama(vocab_size=NUM_TOKENS),
        sft(folder, **settings),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=chat_tokenizer(),
    )


@pytest.mark.parametrize("completion_only", [None, False])
def test_packed_rows_have_the_loss_of_single_ones(
    completion_only: bool | None, tmp_path: Path
) -> None:
    """All samples are in one batch, packed or not: the mean over labels is the same number."""
    found = []
    for settings in (
        {"per_device_train_batch_size": 16, "packing": False},
        {},
        {"per_device_train_batch_size": 99},
    ):
        made = trainer(tmp_path, completion_only_loss=completion_only, **settings)
        made.train()
        found.append((losses(made)[0], made.evaluate()["eval_loss"]))
    for packed in found[1:]:
        assert packed == pytest.approx(found[0], rel=1e-5)


def test_rows_are_full_and_have_positions(tmp_path: Path) -> None:
    (batch,) = trainer(tmp_path)._loaders.training(ROWS)
    assert len(batch["input_ids"]) < 8
    assert (batch["position_ids"] == 0).sum() >= 16
    assert "attention_mask" not in batch
    streamed = list(trainer(tmp_path)._loaders.training(Stream()))
    assert sum(int((each["labels"] != -100).sum()) for each in streamed) == int(
        (batch["labels"] != -100).sum()
    )
    (single,) = trainer(
        tmp_path, eval_packing=False, per_device_eval_batch_size=16
    )._loaders.evaluation(ROWS)
    assert single["attention_mask"].shape[0] == 16
    named = [{"body": row["prompt"]} for row in ROWS]
    (text,) = trainer(tmp_path, dataset_text_field="body")._loaders.training(named)
    assert torch.equal(text["labels"][0, 1:3], text["input_ids"][0, 1:3])


def test_only_answers_are_labels(tmp_path: Path) -> None:
    (every,) = trainer(tmp_path, max_length=128)._loaders.training(conversations(4))
    settings = {"max_length": 128, "assistant_only_loss": True}
    (answers,) = trainer(tmp_path, **settings)._loaders.training(conversations(4))
    assert torch.equal(every["input_ids"], answers["input_ids"])
    assert (answers["labels"] != -100).sum() < (every["labels"] != -100).sum()


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"input_ids": [1, 2]}] * 4, {}, "packing=True, and train_dataset is tokenised"),
        (ROWS, {"max_length": None}, "set max_length to the tokens of a row"),
        ([{"body": "a"}] * 4, {}, "columns 'body'; needed"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    rows: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, rows, **settings).train()


def test_a_collator_of_ones_own_is_refused(tmp_path: Path) -> None:
    args = sft(tmp_path, packing=True)
    made = mt.Trainer(llama(), args, lambda rows: rows, ROWS, processing_class=chat_tokenizer())
    with pytest.raises(ConfigError, match="packing=True, and a data_collator is given"):
        made.train()
