"""What is said of the first step: of parameters that no gradient reached, and of no others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": -1,
}


class Net(LightningModule):
    """Layers, one of which may be left out."""

    def __init__(self, skipped: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.skipped = skipped

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skipped:
                batch = layer(batch)
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Two(Net):
    """Two optimizers that step one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        halves = (self.layers[:2], self.layers[2:])
        for optimizer, layers in zip(self.optimizers(), halves, strict=True):
            optimizer.zero_grad()
            out = batch
            for layer in layers:
                out = layer(out)
            self.manual_backward(out.pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = (self.layers[:2], self.layers[2:])
        return [torch.optim.AdamW(half.parameters(), lr=1e-3) for half in halves]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "first step" in each.getMessage()]


def fit(module: LightningModule, directory: Path, num_fits: int = 1, **settings: Any) -> None:
    strategy = mt.MegaTrainStrategy(directory, max_ram_gb=0.1)
    trainer = Trainer(strategy=strategy, **QUIET, **settings)
    for index in range(num_fits):
        trainer.fit_loop.epoch_loop.max_steps = 3 * (index + 1)
        trainer.fit(module, DataLoader(torch.randn(8, 64), 2))
    assert trainer.global_step >= 3 * num_fits


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}], ids=["eager", "deferred"])
def test_a_parameter_that_is_left_out_is_named_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING, "mt_lightning"):
        fit(Net(skipped=1), tmp_path, **settings)
    (message,) = said(caplog)
    assert "reached 2 parameter(s)" in message
    assert "layers.1.bias, layers.1.weight" in message


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}], ids=["eager", "deferred"])
def test_nothing_is_said_of_a_second_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING, "mt_lightning"):
        fit(Net(), tmp_path, num_fits=2, **settings)
    assert said(caplog) == []


def test_nothing_is_said_of_optimizers_that_step_in_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mt_lightning"):
        fit(Two(), tmp_path)
    assert said(caplog) == []


def test_nothing_is_said_of_a_second_step_without_gradients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        caplog.at_level(logging.WARNING, "mt_lightning"),
        mt.page(model, optimizer, offload_dir=tmp_path, max_ram_gb=0.1) as paged_model,
    ):
        for _ in range(3):
            model(torch.randn(2, 64)).pow(2).mean().backward()
            for _ in range(2):
                optimizer.step()
                optimizer.zero_grad()
        assert paged_model.num_steps == 6
    assert said(caplog) == []
