"""A state dict of a running fit: current wherever it begins, and its cost follows the modules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt
import mt_lightning.engine.attached as attached_module
from mt_lightning.engine.attached import Attached
from mt_lightning.engine.parking import Parking
from mt_lightning.engine.steps import Steps

WIDTH = 16


class Scaled(nn.Module):
    """A unit, and beside it a parameter that stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.scale


class Net(LightningModule):
    """Looks at state dicts behind each step."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Scaled() for _ in range(num_layers))
        self.look: Any = lambda: None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(module: Net, strategy: Any, steps: int = 3) -> None:
    torch.manual_seed(1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.randn(8, WIDTH), batch_size=2))  # pyright: ignore[reportArgumentType]


def paged(directory: Path, durability: Any, units: Any = "Linear") -> mt.MegaTrainStrategy:
    return mt.MegaTrainStrategy(directory, max_ram_gb=0.1, durability=durability, units=units)


WHERE = {
    "all": lambda net: net.state_dict(),
    "a part": lambda net: net.layers[1].state_dict(),
    "one unit": lambda net: net.layers[1].linear.state_dict(),
    "a part that is named": lambda net: net.layers[1].state_dict(prefix="some."),
    "a part of something else": lambda net: nn.ModuleDict({"x": net.layers}).state_dict(),
}


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
@pytest.mark.parametrize("where", WHERE)
def test_it_is_current_wherever_it_begins(tmp_path: Path, where: str, durability: str) -> None:
    found: list[list[dict[str, Tensor]]] = []
    for strategy in ("auto", paged(tmp_path, durability)):
        net, dicts = Net(3), []

        def look(net: Net = net, dicts: list[Any] = dicts) -> None:
            # Edited by hand, as a hook may; and read twice, the first one being held.
            with torch.no_grad():
                net.layers[1].scale.mul_(1.5)
            for _ in range(2):
                dicts.append({k: v.clone() for k, v in WHERE[where](net).items()})

        net.look = look
        fit(net, strategy)
        found.append(dicts)
    plain, own = found
    assert len(plain) == 6
    for expected, actual in zip(plain, own, strict=True):
        assert list(actual) == list(expected)
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_its_cost_follows_the_number_of_modules(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(holder: Any, name: str, of: Any = lambda *_: 1) -> None:
        inner = getattr(holder, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += of(*args)
            return inner(*args, **kwargs)

        monkeypatch.setattr(holder, name, counted)

    count(attached_module, "hash_blocks", lambda memory: memory.nbytes)
    count(Attached, "drain")
    count(Steps, "drain")
    count(Parking, "forget_dead")
    count(Parking, "show_again")
    costs = {}
    for num_layers in (5, 40):
        net = Net(num_layers)
        held: list[Any] = []

        def look(net: Net = net, held: list[Any] = held) -> None:
            calls.clear()
            held.append(net.state_dict())

        net.look = look
        fit(net, paged(tmp_path / str(num_layers), durability), steps=2)
        costs[num_layers] = dict(calls)
    few, many = costs[5], costs[40]
    assert many["show_again"] - few["show_again"] == 35
    resident_bytes = 40 * WIDTH * 4
    assert resident_bytes <= many["hash_blocks"] <= resident_bytes + 8192
    for name in ("drain", "forget_dead"):
        assert many[name] == few[name], name
