"""bf16-true with models of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mt_lightning as mt

from ..huggingface.trainer_cases import arguments, llama, samples


def loader() -> DataLoader:
    return DataLoader(samples(4), batch_size=2)  # type: ignore[arg-type]


def train(model: Any, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    made = Trainer(
        strategy=mt.MegaTrainStrategy(max_ram_gb=0.1),
        max_steps=2,
        max_epochs=-1,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = mt.CausalLMModule(model)
    made.fit(module, loader(), loader())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_either_dtype_trains_and_is_saved_in_bfloat16(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    llama().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).train()
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    made = train(model, precision="bf16-true")
    assert made.lightning_module.model.model.rotary_emb.inv_freq.dtype == torch.float32  # type: ignore[union-attr]
    made.lightning_module.save_pretrained(tmp_path / "out")  # type: ignore[operator]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, param in saved.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, model.get_parameter(name))
    rests = made.strategy.engine.master_rests()  # type: ignore[attr-defined]
    # Steps of 1e-5 are too small for bfloat16 in most places, and not lost.
    changed = [name for name in before if bool(rests[f"model.{name}"].any())]
    assert len(changed) == len(before)


def test_bf16_of_training_arguments_is_mixed_as_in_transformers(tmp_path: Path) -> None:
    trainer = mt.Trainer(
        llama(), arguments(tmp_path, bf16=True, max_steps=1), train_dataset=samples(8)
    )
    trainer.train()
    assert trainer.lightning_trainer.precision == "bf16-mixed"
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_the_model_is_not_touched_where_the_budget_is_too_small() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    made = Trainer(
        strategy=mt.MegaTrainStrategy(max_ram_gb=1e-6),
        max_epochs=-1,
        precision="bf16-true",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(mt.BudgetError):
        made.fit(mt.CausalLMModule(model), loader(), loader())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_masters_are_not_dropped_by_a_fit_in_another_precision() -> None:
    module = mt.CausalLMModule(llama())

    def fit(precision: Any) -> None:
        Trainer(
            strategy=mt.MegaTrainStrategy(max_ram_gb=0.1),
            precision=precision,
            max_steps=1,
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        ).fit(module, loader(), loader())

    fit("bf16-true")
    fit("bf16-true")
    with pytest.raises(mt.ConfigError, match=r"precision is now '32-true'.*module\.float\(\)"):
        fit("32-true")
    module.float()
    fit("32-true")
    assert module.model.lm_head.weight.dtype == torch.float32  # type: ignore[union-attr]
