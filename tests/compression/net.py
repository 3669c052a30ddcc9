"""A small language model with parameters of every kind that packing treats differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCAB, WIDTH = 1280, 448
"""The embedding has more elements than one grain of packed state, so that it can be cut."""

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 160)
        self.down = nn.Linear(160, WIDTH)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        self.odd = nn.Parameter(torch.randn(67, 71))
        self.gain = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.zeros(1, 1))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.drop(y) * self.gain + self.one + self.odd.mean() + self.empty.sum()


class Net(LightningModule):
    def __init__(self, make_optimizer: MakeOptimizer, tied: bool = False) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def fit(
    net: Net,
    strategy: Any = "auto",
    *,
    max_steps: int = 4,
    ckpt_path: Any = None,
    **settings: Any,
) -> Trainer:
    """Train on fixed random tokens; deterministic given the network."""
    seed_everything(1)
    tokens = torch.randint(VOCAB, (16, 9), generator=torch.Generator().manual_seed(3))
    trainer = Trainer(
        strategy=strategy,
        max_steps=max_steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(net, DataLoader(tokens, batch_size=2), ckpt_path=ckpt_path)
    return trainer


def make_net(make_optimizer: MakeOptimizer, *, tied: bool = False) -> Net:
    seed_everything(0)
    return Net(make_optimizer, tied)


def assert_same_training(expected: Net, actual: Net) -> None:
    """Compare the ends of two runs, of which the second may have been resumed."""
    assert actual.losses
    last = expected.losses[-len(actual.losses) :]
    assert torch.equal(torch.stack(last), torch.stack(actual.losses))
    found = actual.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(value, found[name]), name
