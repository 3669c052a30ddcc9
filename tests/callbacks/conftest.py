from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH = 16
NUM_LAYERS = 3


class Net(LightningModule):
    """A stack of layers trained to be the identity."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = target = batch["input_ids"].float()
        for layer in self.layers:
            x = layer(x)
        return (x - target).pow(2).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_loader(num_samples: int = 64) -> DataLoader[Any]:
    rows = [{"input_ids": torch.full((WIDTH,), i % 7)} for i in range(num_samples)]
    return DataLoader(rows, batch_size=2)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Trainer]:
    """Give a function that fits the net with the callbacks and returns the trainer."""

    def run(
        callbacks: list[Callback], *, module: LightningModule | None = None, **settings: Any
    ) -> Trainer:
        defaults = {
            "strategy": "megatrain",
            "accelerator": "cpu",
            "max_steps": 8,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 2,
            "default_root_dir": tmp_path,
        }
        trainer = Trainer(callbacks=callbacks, **{**defaults, **settings})
        trainer.fit(module or Net(), make_loader(), make_loader(8))
        return trainer

    return run
