"""Hugging Face's own Trainer trains a paged model to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mt_lightning as mt

IDS = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(1))
DATA: Any = [{"input_ids": row, "labels": row} for row in IDS]
KEYS = ("loss", "grad_norm", "eval_loss", "learning_rate")


def _train(directory: Path, *, paged: bool, max_grad_norm: float) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    handle = mt.page(model, optimizer, offload_dir=directory / "pages") if paged else None
    arguments = TrainingArguments(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        save_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        max_grad_norm=max_grad_norm,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=DATA,
        eval_dataset=DATA[:2],
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    seen = [[entry.get(key) for key in KEYS] for entry in trainer.state.log_history]
    if handle is not None:
        handle.save_pretrained(directory / "saved")
        handle.close()
    return model, seen


@pytest.mark.parametrize("max_grad_norm", [0.05, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own
def test_equals_the_trainer_without_pages(tmp_path: Path, max_grad_norm: float) -> None:
    plain, expected = _train(tmp_path / "plain", paged=False, max_grad_norm=max_grad_norm)
    model, seen = _train(tmp_path / "paged", paged=True, max_grad_norm=max_grad_norm)
    assert seen == expected
    for folder in ("saved", "out/checkpoint-2"):
        saved = LlamaForCausalLM.from_pretrained(tmp_path / "paged" / folder)
        for p, q, r in zip(plain.parameters(), model.parameters(), saved.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p, r)
