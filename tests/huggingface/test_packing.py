"""Packed rows: whole, apart from each other, proved at the start, and bit for bit under pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM, PreTrainedModel

import mt_lightning as mt
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import CausalLMModule, TextDataModule, session
from mt_lightning.huggingface.data.packs import best_fit
from mt_lightning.huggingface.data.proof import prove_packing
from tests.huggingface.data_cases import NUM_TOKENS, chat_tokenizer, conversations, shown
from tests.huggingface.trainer_cases import arguments, llama, losses


@pytest.fixture(autouse=True)
def session_of_its_own() -> Iterator[None]:
    yield
    session.reset()


def packed(count: int = 12, **settings: Any) -> TextDataModule:
    settings = {"sequence_length": 128, "batch_size": 2, "val_fraction": 0, **settings}
    data = TextDataModule(
        dataset=conversations(count), tokenizer=chat_tokenizer(), packing=True, **settings
    )
    data.setup()
    return data


def bloom() -> PreTrainedModel:
    """Give a model that looks at no positions: packed samples see each other."""
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=NUM_TOKENS, hidden_size=32, n_layer=2, n_head=2))


def model(**settings: Any) -> LlamaForCausalLM:
    made = llama(vocab_size=NUM_TOKENS, max_position_embeddings=128, **settings)
    assert isinstance(made, LlamaForCausalLM)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_lies_in_one_row_that_it_fits(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 64) for _ in range(200)]
    rows = best_fit(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert len(rows) <= 1.1 * -(-sum(lengths) // 64)
    assert best_fit(lengths, 64) == rows


def test_positions_and_labels_begin_anew_with_each_sample() -> None:
    data = packed()
    train: Any = data.train_dataset
    texts = []
    for row in (train[i] for i in range(len(train))):
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        assert len(starts) > 1
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            assert row["position_ids"][start:stop].tolist() == list(range(stop - start))
            assert row["labels"][start] == -100
            texts.append(shown(data.tokenizer, {k: v[start:stop] for k, v in row.items()}))
    single = TextDataModule(
        dataset=conversations(12), tokenizer=chat_tokenizer(), sequence_length=128, val_fraction=0
    )
    single.setup()
    alone: Any = single.train_dataset
    assert sorted(texts) == sorted(shown(data.tokenizer, alone[i]) for i in range(12))
    for batch in data.train_dataloader():
        assert "attention_mask" not in batch


def test_packed_samples_have_the_loss_and_the_gradients_of_single_ones() -> None:
    data = packed(batch_size=8)
    (batch,) = list(data.train_dataloader())
    together, apart = model(), model()
    together(**batch, use_cache=False).loss.backward()
    count = (batch["labels"] != -100).sum()
    data.packing = False
    data._train = None
    data.batch_size = 1
    data.setup()
    total = torch.zeros(())
    for one in data.train_dataloader():
        share = (one["labels"] != -100).sum() / count
        loss = apart(**one, use_cache=False).loss * share
        loss.backward()
        total += loss.detach()
    assert torch.allclose(total, together(**batch, use_cache=False).loss, rtol=1e-6)
    for p, q in zip(apart.parameters(), together.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_the_proof_changes_nothing() -> None:
    net = model().train()
    net.model.layers[0].eval()
    before = [p.detach().clone() for p in net.parameters()]
    state = torch.get_rng_state()
    prove_packing(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert not net.model.layers[0].training
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))


class Deaf(nn.Module):
    """Looks at one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **_: Any) -> Any:
        logits = self.embed(input_ids)
        return type("Output", (), {"logits": logits})


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        return self.net(input_ids=input_ids, use_cache=use_cache)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (bloom, "logits of packed samples differ by .* from those of single ones"),
        (Deaf, "do not depend on other tokens"),
        (Strict, "does not take position_ids"),
    ],
)
def test_models_that_mix_samples_are_refused(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(
        ConfigError, match=f"data.packing=True, but {make().__class__.__name__}.*{why}"
    ):
        prove_packing(make())


def fit(net: PreTrainedModel, strategy: Any, data: TextDataModule, folder: Path) -> CausalLMModule:
    module = CausalLMModule(net, learning_rate=1e-2)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=4,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module


def test_pages_train_packed_rows_to_the_same_bits(tmp_path: Path) -> None:
    plain = fit(model(), "auto", packed(val_fraction=0.2), tmp_path)
    pages = mt.MegaTrainStrategy(offload_dir=tmp_path / "pages", max_ram_gb=0.001)
    paged = fit(model(), pages, packed(val_fraction=0.2), tmp_path)
    start = dict(model().named_parameters())
    for name, p in plain.model.named_parameters():
        assert torch.equal(p, paged.model.get_parameter(name)), name
        assert not torch.equal(p, start[name]), name


@pytest.mark.parametrize("strategy", ["auto", "megatrain"])
def test_a_fit_refuses_what_is_not_proved(strategy: str, tmp_path: Path) -> None:
    net = bloom()
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ConfigError, match="BloomForCausalLM does not keep packed samples apart"):
        fit(net, strategy, packed(val_fraction=0.2), tmp_path)
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))


def test_the_trainer_takes_packed_rows(tmp_path: Path) -> None:
    data = packed()
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2}
    for net in (model(), bloom()):
        trainer = mt.Trainer(
            net,
            arguments(tmp_path, **settings),
            train_dataset=data.train_dataset,
            data_collator=data.collator,
        )
        if isinstance(net, BloomForCausalLM):
            with pytest.raises(ConfigError, match="does not keep packed samples apart"):
                trainer.train()
        else:
            trainer.train()
            assert len(losses(trainer)) == 2


def test_the_trainer_takes_rows_that_are_not_tokenised(tmp_path: Path) -> None:
    rows = conversations(8)
    single = TextDataModule(
        dataset=rows, tokenizer=chat_tokenizer(), sequence_length=128, val_fraction=0
    )
    single.setup()
    seen = []
    for dataset, settings in (
        (rows, {"processing_class": chat_tokenizer()}),
        (single.train_dataset, {"data_collator": single.collator}),
    ):
        trainer = mt.Trainer(
            model(), arguments(tmp_path, max_steps=3), train_dataset=dataset, **settings
        )
        trainer.train()
        seen.append(losses(trainer))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3


def test_columns_that_are_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "completion": "b", "input": "c"}] * 4
    made = arguments(tmp_path, max_steps=1)
    mt.Trainer(llama(vocab_size=NUM_TOKENS), made, None, rows, None, chat_tokenizer()).train()
    assert "train_dataset: samples are made of 'prompt' and 'completion'; not read: 'input'" in (
        caplog.text
    )


def test_a_step_without_labels_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(4), "labels": torch.full((4,), -100)}] * 8
    with pytest.raises(ConfigError, match=r"all labels of the 4 batch\(es\) of a step are -100"):
        mt.Trainer(model(), arguments(tmp_path), train_dataset=rows).train()
    module = CausalLMModule(model())
    batch = {key: value.unsqueeze(0) for key, value in rows[0].items()}
    with pytest.raises(ConfigError, match="all labels of a batch of 1 rows are -100"):
        module.training_step(batch, 0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.zeros(1, 200, dtype=torch.int64)}, "200 tokens, and the model takes"),
        ({"input_ids": torch.full((1, 8), NUM_TOKENS)}, "token 259, and the model has embeddings"),
    ],
)
def test_what_a_model_cannot_take_is_told(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CausalLMModule(model()).training_step(batch, 0)


def test_bad_rows_of_a_trainer_are_told(tmp_path: Path) -> None:
    blank = chat_tokenizer()
    blank.pad_token = None  # pyright: ignore
    empty = [{"prompt": "", "completion": "abc"}] * 16
    for rows, tokenizer, message in (
        (conversations(8), chat_tokenizer(None), "has no chat template"),
        ([{"input_ids": [1, 2], "labels": [1, 2]}] * 8, blank, "has no pad_token to fill batches"),
        (empty, chat_tokenizer(), r"all 32 tokens of the first 8 samples .*\(100 %\)"),
        ([{"prompt": "a"}] * 8, chat_tokenizer(), "columns 'prompt'; needed"),
        ([{"labels": [1]}] * 8, chat_tokenizer(), "columns 'labels'; needed"),
    ):
        trainer = mt.Trainer(
            model(), arguments(tmp_path), train_dataset=rows, processing_class=tokenizer
        )
        with pytest.raises(ConfigError, match=message):
            trainer.train()
