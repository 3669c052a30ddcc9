"""What few models have, and what few runs do: to the bits of plain Lightning all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt

WIDTH = 8


class Frequencies(nn.Module):
    """Has complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)


class Turned(nn.Module):
    """Has complex weights whose gradients are conjugated views, which Adam of torch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.weight.conj() * x).imag


class Table(nn.Module):
    """Has frozen whole numbers, which the optimizer is given with the rest."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8)
        self.numbers = nn.Parameter(numbers, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * nn.functional.linear(x, self.numbers.to(x.dtype)) * self.scale


class Net(LightningModule):
    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.lr, self.batch_size = 1e-2, 2

    def loss(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return self.head(batch).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Descending(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Toggled(Net):
    """Freezes what the other optimizer trains between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.layers.parameters(), lr=self.lr)
        return adam, torch.optim.SGD(self.head.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.loss(batch)
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def fit(
    make: Callable[[], Net],
    strategy: Any,
    folder: Path,
    callbacks: list[Callback] | None = None,
    **settings: Any,
) -> Net:
    torch.manual_seed(0)
    net = make()
    Trainer(
        strategy=strategy,
        callbacks=callbacks,
        accelerator="cpu",
        max_steps=4,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    ).fit(net)
    return net


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: Net(Frequencies), {}),
        (lambda: Net(Frequencies), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}),
        (lambda: Descending(Turned), {}),
        (lambda: Net(Table), {}),
        (Toggled, {}),
    ],
    ids=["complex", "complex, clipped", "conjugated", "whole numbers", "toggled"],
)
def test_unusual_models_train_to_the_same_bits(
    make: Callable[[], Net], settings: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    before = make()
    plain = fit(make, "auto", tmp_path, **settings)
    assert_equal(plain, fit(make, mt.MegaTrainStrategy(), tmp_path, **settings))
    for name, param in plain.named_parameters():
        assert torch.equal(param, before.get_parameter(name)) != param.requires_grad, name


@pytest.mark.parametrize("compression", [False, "lossless", True])
@pytest.mark.parametrize(
    "make_finder",
    [
        lambda: BatchSizeFinder(steps_per_trial=2, max_trials=1),
        lambda: LearningRateFinder(num_training_steps=3, update_attr=False),
    ],
    ids=["batch size", "learning rate"],
)
def test_a_trial_run_leaves_no_optimizer_state(
    make_finder: Callable[[], Callback],
    compression: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finders train, and then restore a checkpoint from before the first step."""
    monkeypatch.chdir(tmp_path)

    def run(callbacks: list[Callback], size: int) -> Net:
        strategy = mt.MegaTrainStrategy(optimizer_compression=compression)

        def make() -> Net:
            net = Net()
            net.batch_size = size
            return net

        return fit(make, strategy, tmp_path, callbacks, num_sanity_val_steps=0)

    tried = run([make_finder()], 2)
    assert_equal(tried, run([], tried.batch_size))
