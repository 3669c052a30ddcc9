"""A small net, its trainers, and what has to hold after a failure."""

from __future__ import annotations

import copy
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

WIDTH = 32
NUM_LAYERS = 3


class Block(nn.Module):
    """A residual block: one unit, larger than what stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.linear(self.norm(x))))


class Net(LightningModule):
    """A stack of blocks with a scale that no unit holds, trained to repeat its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.scale = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        return (self(batch) - batch.roll(1, -1)).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Evaluated(Net):
    """The net with all the other loops."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx), batch_size=1)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch, batch_idx), batch_size=1)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


def loader(num_batches: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4 * num_batches, WIDTH, generator=generator)
    return DataLoader(rows, batch_size=4)  # pyright: ignore[reportArgumentType]


def make_trainer(root: Path, strategy: Any = "auto", **settings: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_steps": 4,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": root,
    }
    return Trainer(strategy=strategy, **{**defaults, **settings})


def fit(module: LightningModule, root: Path, strategy: Any = "auto", **settings: Any) -> Trainer:
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = make_trainer(root, strategy, **settings)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bit for bit; NaN equals NaN."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        torch.testing.assert_close(
            actual[name], tensor, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_usable(module: LightningModule, expected: dict[str, Tensor]) -> None:
    """Parameters are finite, as expected, writable and can be used without the strategy."""
    actual = parameters_of(module)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in actual.values())
    assert_same(actual, expected)
    with torch.no_grad():
        assert bool(torch.isfinite(module(torch.ones(2, WIDTH))).all())


def assert_fresh_run_works(module: LightningModule, root: Path, **settings: Any) -> None:
    """Train `module` with a new strategy: to the bit what plain Lightning makes of its weights.

    The twin is of the plain class `Net`: whatever made `module` fail must be over.
    """
    twin = Net()
    twin.load_state_dict(copy.deepcopy(module.state_dict()))
    fit(twin, root, **settings)
    fit(module, root, mt.MegaTrainStrategy(offload_dir=root / "fresh"), **settings)
    assert_same(parameters_of(module), parameters_of(twin))


_PLAIN: dict[tuple[Any, ...], dict[str, Tensor]] = {}
_AS_NUMBERS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


def after(num_steps: int, root: Path, module: LightningModule | None = None, **settings: Any):
    """Return the parameters that plain Lightning has after some steps.

    Trained once for `Net` and settings that are numbers and names.
    """
    if module is not None or not settings.keys() <= set(_AS_NUMBERS):
        return _trained(num_steps, root, module or Net(), **settings)
    key = (num_steps, *sorted(settings.items()))
    if key not in _PLAIN:
        _PLAIN[key] = _trained(num_steps, root, Net(), **settings)
    return _PLAIN[key]


def _trained(num_steps: int, root: Path, module: LightningModule, **settings: Any):
    if num_steps:
        fit(module, root, max_steps=num_steps, **settings)
    return parameters_of(module)


def committed_step(directory: Path) -> int | None:
    latest = CommitLog([directory]).latest()
    return None if latest is None else latest.step


def smallest_gb(module: LightningModule, root: Path, **settings: Any) -> float:
    """Return the budget that the refusal of a far too small one names."""
    with pytest.raises(mt.BudgetError) as caught:
        fit(module, root, mt.MegaTrainStrategy(max_ram_gb=1e-6), **settings)
    smallest = caught.value.smallest_gb
    assert smallest is not None
    assert f"{smallest:.6f}" in str(caught.value)
    return smallest
