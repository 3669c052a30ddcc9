"""Nets whose backward is unusual, each of a few units that do not fit in memory together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import mt_lightning as mt

WIDTH = 64
NUM_LAYERS = 4
NUM_STEPS = 4

EXECUTIONS: list[int] = []
"""One entry for each execution of a block."""


class Block(nn.Module):
    """A residual block that notes when it is executed."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        EXECUTIONS.append(id(self))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(LightningModule):
    """A stack of blocks."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(self.block() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - batch.roll(1, -1)).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        del batch_idx
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Detached(Net):
    """Each block reads its weights once more, in a way that gives them no gradient."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            # In backward the last product comes after the gradient of `down`.
            y = F.linear(x, self.down.weight.detach().T)
            y = F.linear(y, self.up.weight.detach().T)
            return super().forward(x + 0.01 * y)


class Interleaved(Net):
    """Backward goes to and fro between two units."""

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            for _ in range(3):
                x = first(x) + second(x) * 0.5
        return x


class Nested(Net):
    """The user recomputes a part of each block."""

    class block(Block):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            inner = super().forward
            return checkpoint(inner, x, use_reentrant=False)


class Penalised(Net):
    """Differentiates its gradient by the input once more."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        del batch_idx
        batch = batch.clone().requires_grad_()
        out = self(batch)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), batch, create_graph=True)
        return self.loss(batch) + 1e-4 * grad.pow(2).mean()


class Twice(Net):
    """Goes backward through one graph twice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        del batch_idx
        optimizer: Any = self.optimizers()
        out = self(batch)
        optimizer.zero_grad()
        self.manual_backward(out.pow(2).mean(), retain_graph=True)
        self.manual_backward(out.abs().mean())
        optimizer.step()


class Unused(Net):
    """Throws some results away, and keeps the graph of others over the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 2:
            self.layers[0](batch)
            self.layers[-1](batch)
        self.kept = self.layers[1](batch).sum() if batch_idx % 3 == 1 else None
        return self.loss(batch)


class Lengths(Net):
    """Every batch has another length."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch[: 2 + 5 * batch_idx % 8].repeat(1 + batch_idx, 1))


class Dropped(Net):
    """Has dropout; what is drawn must be drawn once."""

    class block(Block):  # noqa: N801
        def __init__(self) -> None:
            super().__init__(0.2)


class Frozen(Net):
    """Every second parameter does not train."""

    def __init__(self) -> None:
        super().__init__()
        for param in list(self.parameters())[1::2]:
            param.requires_grad_(False)


class Shared(Net):
    """The blocks share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.up.weight = self.layers[0].up.weight


NETS = (
    Net, Detached, Interleaved, Nested, Penalised, Twice, Unused, Lengths, Dropped, Frozen, Shared,
)  # fmt: skip


def fit(module: Net, root: Path, strategy: Any = "auto", **settings: Any) -> Trainer:
    """Train for a few steps."""
    torch.manual_seed(1)
    rows = torch.randn(8 * NUM_STEPS, WIDTH)
    defaults = {
        "accelerator": "cpu",
        "max_steps": NUM_STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
    }
    trainer = Trainer(strategy=strategy, **{**defaults, **settings})
    trainer.fit(module, DataLoader(rows, batch_size=8))  # pyright: ignore[reportArgumentType]
    return trainer


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """Compare all parameters bit for bit."""
    for (name, a), b in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


def smallest_gb(make: Any, root: Path, **options: Any) -> float:
    """Return the smallest budget that the refusal of a smaller one names."""
    with pytest.raises(mt.BudgetError) as refusal:
        fit(make(), root, mt.MegaTrainStrategy(max_ram_gb=1e-5, **options))
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb
