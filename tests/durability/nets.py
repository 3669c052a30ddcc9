"""A small language model whose bytes on the drive are easy to count, and runs of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.tiers.commit import CommitLog

VOCAB, WIDTH = 64, 32
PAGE = 4096
ROOMY_GB = 0.1
NUM_LAYERS = 3
LAYERS_BYTES = NUM_LAYERS * 9 * PAGE
"""Weights of all layers, 8352 numbers each, in whole 4 KiB pages."""
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Tiny(LightningModule):
    """Layers with dropout between an embedding and a head, which may be tied to it."""

    def __init__(self, make: Make, *, tied: bool = False, scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        # Outside every unit: it stays in memory and is stepped at once.
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None
        self.make = make
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        if self.scale is not None:
            x = x * self.scale
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)


def compressed(module: nn.Module) -> torch.optim.Optimizer:
    return mt.CompressedAdamW(module.parameters(), lr=1e-2)


def fit(module: LightningModule, strategy: Any = "auto", **settings: Any) -> Trainer:
    """Train for some steps on data that are the same every time."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (200, 9))
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    path = settings.pop("ckpt_path", None)
    trainer = Trainer(strategy=strategy, **{**defaults, **settings})
    data = DataLoader(tokens, batch_size=4, shuffle=True)  # pyright: ignore[reportArgumentType]
    trainer.fit(module, data, ckpt_path=path)
    return trainer


def paged(directory: Path | None = None, **settings: Any) -> mt.MegaTrainStrategy:
    return mt.MegaTrainStrategy(
        directory, **{"durability": "checkpoint", "max_ram_gb": ROOMY_GB, **settings}
    )


def smallest_gb(module: LightningModule, **settings: Any) -> float:
    """Return the smallest budget, which the refusal of a far too small one names."""
    trainer = settings.pop("trainer", {})
    with pytest.raises(mt.BudgetError) as refusal:
        fit(module, paged(**settings, max_ram_gb=1e-6), **trainer)
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """Compare every parameter bit for bit."""
    found = dict(actual.named_parameters())
    for name, param in expected.named_parameters():
        assert torch.equal(found[name], param), name


def committed_step(directory: Path) -> int:
    record = CommitLog([directory]).latest()
    assert record is not None
    return record.step
