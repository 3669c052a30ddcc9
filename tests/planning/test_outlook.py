"""A run says what it was planned to take: exact parts always, times where this machine is known."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from rich.console import Console
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt
from mt_lightning.errors import BudgetError
from mt_lightning.planning.profile import DriveRates, MachineProfile, device_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but")
LOGGER = "mt_lightning.plugins.announcement"


def module() -> mt.CausalLMModule:
    return mt.CausalLMModule(
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, vocab_size=64,
            )
        )
    )  # fmt: skip


def fit(directory: Path, **options: object) -> str:
    """Train two steps; return the tables."""
    console = Console(width=200, file=io.StringIO())
    trainer = Trainer(
        strategy=mt.MegaTrainStrategy(offload_dir=directory / "pages", **options),  # type: ignore[arg-type]
        accelerator="cpu",
        max_steps=2,
        callbacks=[mt.PagingMonitor(console=console)],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    ids = torch.randint(0, 64, (2, 16))
    trainer.fit(module(), DataLoader([{"input_ids": row} for row in ids]))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineProfile:
    """Keep a profile of this machine."""
    monkeypatch.setenv("MT_LIGHTNING_CACHE", str(tmp_path / "cache"))
    rates = DriveRates(
        directory=str(tmp_path),
        device=device_of(tmp_path),
        file_system="ext4",
        direct=True,
        read_bytes_per_s=1e6,
        write_bytes_per_s=1e6,
        mixed_read_bytes_per_s=1e6,
        mixed_write_bytes_per_s=1e6,
        read_cpu_s_per_gib=0.1,
        write_cpu_s_per_gib=0.1,
    )
    profile = MachineProfile(
        measured_at="2026-11-30T12:00:00+00:00",
        num_threads=1,
        memory_bytes_per_s=1e10,
        flops_per_s={"float32": 1e8},
        update_params_per_s={"raw": 1e6},
        drives=(rates,),
    )
    profile.save()
    return profile


def test_without_a_profile_only_what_is_exact_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MT_LIGHTNING_CACHE", str(tmp_path / "none"))
    with caplog.at_level(logging.INFO, LOGGER):
        text = fit(tmp_path)
    assert len([r for r in caplog.records if r.name == LOGGER]) == 1
    assert "planned" in text
    assert "time per step, planned" not in text


def test_with_a_profile_the_time_is_said_before_and_compared_after(
    tmp_path: Path,
    measured: MachineProfile,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = []
    load = MachineProfile.load
    monkeypatch.setattr(MachineProfile, "load", lambda: loads.append(1) or load())
    with caplog.at_level(logging.INFO, LOGGER):
        text = fit(tmp_path, durability="step")
    said = [r.getMessage() for r in caplog.records if r.name == LOGGER][-1]
    assert loads == [1]  # once, for what is said and for all who compare
    assert "2026-11-30" in said
    assert "computing sets the time" in said
    # Weights and state are written at every step: their bytes by 1 MB/s are the least.
    line = next(line for line in text.splitlines() if "time per step, planned" in line)
    seconds = float(line.split("│")[2].split()[0])
    written = 3 * 4 * sum(p.numel() for p in module().parameters())
    assert seconds > 0.4 * written / 1e6
    assert "drives" in line


def test_what_ram_cannot_hold_is_refused_before_a_page_is_written(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"smallest that works is max_ram_gb="):
        fit(tmp_path, max_ram_gb=1e-5)
    pages = [p for p in (tmp_path / "pages").rglob("*") if p.is_file() and p.stat().st_size > 4096]
    assert pages == []
