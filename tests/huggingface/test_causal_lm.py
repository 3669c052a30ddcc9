"""The loss, the perplexity, the optimizer and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional
from torchmetrics.text import Perplexity
from transformers import LlamaForCausalLM

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import CausalLMModule, TextDataModule
from mt_lightning.huggingface.causal_lm import learning_rate_factor, update_perplexity

MakeLlama = Callable[..., LlamaForCausalLM]


def make_trainer(**settings: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_steps": 4,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 3,
    }
    return Trainer(**{**defaults, **settings})


@pytest.fixture
def data(tmp_path: Path) -> TextDataModule:
    path = tmp_path / "a.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return TextDataModule(path, tokenizer="bytes", sequence_length=80, batch_size=2)


def test_loss_is_the_next_token_loss(tiny_llama: MakeLlama) -> None:
    module = CausalLMModule(tiny_llama())
    module.log = lambda *args, **kwargs: None
    ids = torch.randint(257, (2, 9))
    loss = module.training_step({"input_ids": ids}, 0)
    logits = module.model(input_ids=ids).logits
    expected = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)


def test_padding_and_labels_are_respected(tiny_llama: MakeLlama) -> None:
    module = CausalLMModule(tiny_llama())
    module.log = lambda *args, **kwargs: None
    ids = torch.randint(257, (1, 8))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    short = module.training_step({"input_ids": ids[:, :5]}, 0)
    padded = module.training_step({"input_ids": ids, "attention_mask": mask}, 0)
    torch.testing.assert_close(padded, short)
    labels = ids.masked_fill(mask == 0, -100)
    labelled = module.training_step({"input_ids": ids, "labels": labels}, 0)
    torch.testing.assert_close(labelled, short)


def test_perplexity_is_exp_of_the_loss(tiny_llama: MakeLlama, data: TextDataModule) -> None:
    module = CausalLMModule(tiny_llama())
    trainer = make_trainer()
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]), rel=1e-5)


def test_slices_do_not_change_the_perplexity() -> None:
    logits, labels = torch.randn(2, 150, 11), torch.randint(11, (2, 150))
    labels[0, 100:] = -100
    whole, sliced = Perplexity(ignore_index=-100), Perplexity(ignore_index=-100)
    whole.update(logits[:, :-1], labels[:, 1:])
    update_perplexity(sliced, logits, labels)
    torch.testing.assert_close(sliced.compute(), whole.compute())


def test_validate_fit_validate_test(tiny_llama: MakeLlama, data: TextDataModule) -> None:
    module = CausalLMModule(tiny_llama(), learning_rate=5e-3, warmup_steps=2, scheduler="cosine")
    data.test_dataloader = data.val_dataloader
    trainer = make_trainer(max_steps=12, num_sanity_val_steps=1, val_check_interval=5)
    (before,) = trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    (after,) = trainer.validate(module, datamodule=data, verbose=False)
    (test,) = trainer.test(module, datamodule=data, verbose=False)
    assert after["val_perplexity"] < before["val_perplexity"] / 2
    assert test["test_perplexity"] == pytest.approx(after["val_perplexity"])
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.0, 0.0]


def test_megatrain_changes_no_bit(
    tiny_llama: MakeLlama, data: TextDataModule, tmp_path: Path
) -> None:
    results = []
    for strategy in ("auto", "megatrain"):
        module = CausalLMModule(tiny_llama(), warmup_steps=2, scheduler="linear")
        trainer = make_trainer(
            strategy=strategy, gradient_clip_val=1.0, max_steps=6, default_root_dir=tmp_path
        )
        trainer.fit(module, datamodule=data)
        (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
        prompt = data.tokenizer("the quick", return_tensors="pt", return_token_type_ids=False)
        written = module.model.generate(**prompt, max_new_tokens=8, do_sample=False)  # pyright: ignore
        weights = {name: p.detach().clone() for name, p in module.model.named_parameters()}
        results.append((metrics, written.tolist(), weights))
    (plain, plain_text, plain_weights), (paged, paged_text, paged_weights) = results
    assert paged == plain
    assert paged_text == plain_text
    assert all(torch.equal(paged_weights[name], plain_weights[name]) for name in plain_weights)


def test_a_checkpoint_restores_the_module(tiny_llama: MakeLlama, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    module = CausalLMModule(str(tmp_path / "model"), learning_rate=0.5, scheduler="linear")
    assert module.model.training
    with torch.no_grad():
        next(module.parameters()).fill_(3.0)
    trainer = make_trainer(max_steps=0)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert (loaded.learning_rate, loaded.scheduler) == (0.5, "linear")
    assert torch.equal(next(loaded.parameters()), next(module.parameters()))


def test_only_matrices_decay(tiny_llama: MakeLlama) -> None:
    module = CausalLMModule(tiny_llama(), weight_decay=0.3, learning_rate=0.2, betas=(0.5, 0.6))
    optimizer = module.configure_optimizers()
    decaying, plain = optimizer.param_groups
    assert {p.dim() for p in decaying["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert (plain["lr"], plain["betas"]) == (0.2, (0.5, 0.6))
    assert isinstance(optimizer, torch.optim.AdamW)


def test_an_optimizer_of_ones_own(tiny_llama: MakeLlama) -> None:
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    factory = partial(torch.optim.SGD, lr=0.5, weight_decay=0.1)
    optimizer = CausalLMModule(model, optimizer=factory).configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p is not model.model.embed_tokens.weight for p in held)


def test_schedules() -> None:
    constant = [learning_rate_factor("constant", 3, math.inf, step) for step in range(5)]
    assert constant == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = [learning_rate_factor("linear", 0, 4, step) for step in range(6)]
    assert linear == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = [learning_rate_factor("cosine", 0, 4, step) for step in (0, 2, 4)]
    assert cosine == pytest.approx([1.0, 0.5, 0.0])


def test_errors_name_the_setting(tiny_llama: MakeLlama) -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError, match="scheduler='step' is unknown"):
        CausalLMModule(model, scheduler="step")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="warmup_steps=-1 is negative"):
        CausalLMModule(model, warmup_steps=-1)
    with pytest.raises(ConfigError, match="Set them in the optimizer"):
        CausalLMModule(model, optimizer=torch.optim.SGD, learning_rate=0.1)
    with pytest.raises(
        ConfigError, match="The optimizer refused its settings: Invalid learning rate: -1"
    ):
        CausalLMModule(model, optimizer=partial(torch.optim.SGD, lr=-1)).configure_optimizers()
    endless = CausalLMModule(model, scheduler="cosine")
    endless._trainer = SimpleNamespace(estimated_stepping_batches=math.inf)  # pyright: ignore
    with pytest.raises(ConfigError, match=r"Trainer\(max_steps=...\)"):
        endless.configure_optimizers()
