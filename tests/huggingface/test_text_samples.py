"""Samples are written after every validation, and training does not notice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt

SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 4,
    "val_check_interval": 2,
    "limit_val_batches": 1,
}


def make_module() -> LightningModule:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,  # draws from the generators that sampling must leave alone
    )
    return mt.CausalLMModule(LlamaForCausalLM(config))


def fit(root: Path, callbacks: list[Any], strategy: Any) -> LightningModule:
    module = make_module()
    tokens = torch.arange(8 * 16).reshape(8, 16) % 257
    rows = DataLoader([{"input_ids": row} for row in tokens], batch_size=2)  # pyright: ignore
    torch.manual_seed(1)
    trainer = Trainer(strategy=strategy, callbacks=callbacks, default_root_dir=root, **SETTINGS)
    trainer.fit(module, rows, rows)
    return module


@pytest.mark.parametrize("max_ram_gb", [None, 0.001], ids=["in memory", "on the drive"])
def test_samples_are_those_of_plain_training_and_change_nothing(
    tmp_path: Path, max_ram_gb: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    texts = []
    for name, strategy in (
        ("auto", "auto"),
        ("paged", mt.MegaTrainStrategy(max_ram_gb=max_ram_gb, layer_major=False)),
    ):
        with caplog.at_level(logging.INFO, logger="mt_lightning"):
            sampled = fit(tmp_path / name, [mt.TextSamples(["To be", "O"], "bytes", 4)], strategy)
        texts.append((tmp_path / name / "samples.txt").read_bytes())
        assert texts[-1].count(b"--- step 2\nTo be") == texts[-1].count(b"--- step 4\nTo be") == 1
    assert texts[0] == texts[1]
    assert any("step 2: To be" in record.message for record in caplog.records)
    plain = fit(tmp_path / "plain", [], "auto")
    for one, other in zip(sampled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(mt.ConfigError, match="give a list"):
        mt.TextSamples("To be", "bytes")
    with pytest.raises(mt.ConfigError, match="max_new_tokens=0"):
        mt.TextSamples(["To be"], "bytes", 0)
