"""The run that paged training on a device has to equal, bit for bit.

Forward and backward run on the device; clipping and the update run where the kit runs them, on the
host, on a copy of the weights. On a CPU this is plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mt_lightning.optim.masters import round_to

WIDTH = 256
NUM_LAYERS = 6
NUM_STEPS = 5
BATCH = 8
LR = 1e-3


class Block(nn.Module):
    """A residual block with dropout."""

    dropout = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(hidden)


class Net(LightningModule):
    """A stack of blocks, and a parameter and a buffer outside of them."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._optimizer, self._settings = optimizer, settings
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.on_forward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift
        for layer in self.layers:
            self.on_forward()
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        return (self(batch) - batch.roll(1, -1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters(), lr=LR, **self._settings)


def data() -> Tensor:
    """Return the rows of all steps."""
    return torch.randn(NUM_STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


@contextmanager
def deterministic() -> Iterator[None]:
    """Let kernels give the same bits each time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def train_reference(
    device: torch.device, num_steps: int = NUM_STEPS, clip_norm: float | None = None
) -> Net:
    """Train with the update on the host; return the model on the host."""
    host, there = Net(), Net().to(device)
    optimizer = torch.optim.AdamW(host.parameters(), lr=LR)
    torch.manual_seed(2)
    for rows in data().split(BATCH)[:num_steps]:
        there.training_step(rows.to(device), 0).backward()
        for mine, its in zip(host.parameters(), there.parameters(), strict=True):
            assert its.grad is not None
            mine.grad, its.grad = its.grad.cpu(), None
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(host.parameters(), clip_norm)
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(host.parameters(), there.parameters(), strict=True):
                its.copy_(mine)
    return host


class Halves(Net):
    """Computes in the dtype of its weights, and keeps its buffer in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


def train_masters(device: torch.device, num_steps: int = NUM_STEPS) -> Net:
    """Train bfloat16 weights, and fp32 masters of them, on a device; return the weights."""
    masters, there = Halves().to(device), Halves().to(device)
    optimizer = masters.configure_optimizers()
    pairs = list(zip(masters.parameters(), there.parameters(), strict=True))

    def show() -> None:
        for master, weight in pairs:
            weight.data = round_to(torch.empty_like(master, dtype=torch.bfloat16), master.detach())

    show()
    torch.manual_seed(2)
    for rows in data().split(BATCH)[:num_steps]:
        there.training_step(rows.to(device, torch.bfloat16), 0).backward()
        for master, weight in pairs:
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        show()
    return there.cpu()


def fit(module: Net, strategy: Any, root: Any, **settings: Any) -> Trainer:
    """Train by Lightning."""
    torch.manual_seed(2)
    defaults = {
        "max_steps": NUM_STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": root,
    }
    trainer = Trainer(strategy=strategy, **{**defaults, **settings})
    loader: Any = DataLoader(data(), batch_size=BATCH)  # pyright: ignore[reportArgumentType]
    trainer.fit(module, loader)
    return trainer


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """Compare all parameters, which are on the host by now, bit for bit."""
    for (name, a), b in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert a.device.type == "cpu", name
        assert torch.equal(a, b), name
