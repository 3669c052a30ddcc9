"""Memory and disk that are too small: refused at start, with the smallest amount that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mt_lightning as mt

from .nets import (
    WIDTH,
    Net,
    after,
    assert_same,
    assert_usable,
    fit,
    loader,
    make_trainer,
    parameters_of,
    smallest_gb,
)

VOCAB_SIZE = 400


class Tied(Net):
    """An embedding and a head that share their weight, and no unit that is much larger."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = (batch * 50).long().clamp(0, VOCAB_SIZE - 1)
        logits = self.head(self(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


NETS = {"layers": Net, "tied": Tied}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "clip": {"gradient_clip_val": 0.1},
    "accumulate": {"accumulate_grad_batches": 2},
    "accumulate and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


def make_net(net: str, optimizer: str) -> Net:
    module = NETS[net]()
    module.configure_optimizers = lambda: OPTIMIZERS[optimizer](module.parameters())  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    ("net", "optimizer", "setting"),
    [
        *[
            pytest.param("layers", optimizer, setting, marks=[pytest.mark.slow] * ((i + j) % 2))
            for i, optimizer in enumerate(OPTIMIZERS)
            for j, setting in enumerate(SETTINGS)
        ],
        *[("tied", optimizer, "eager") for optimizer in OPTIMIZERS],
        *[("tied", "adamw", setting) for setting in SETTINGS if setting != "eager"],
    ],
)
def test_smallest_budget_works_and_less_is_refused(
    tmp_path: Path, net: str, optimizer: str, setting: str
) -> None:
    settings = SETTINGS[setting]
    module = make_net(net, optimizer)
    start = parameters_of(module)
    smallest = smallest_gb(module, tmp_path, **settings)
    assert_usable(module, start)
    with pytest.raises(mt.BudgetError, match=r"max_ram_gb=.*units=\[") as caught:
        fit(module, tmp_path, mt.MegaTrainStrategy(max_ram_gb=0.95 * smallest), **settings)
    assert isinstance(caught.value, MemoryError)
    assert_usable(module, start)
    assert not list((tmp_path / "megatrain").glob("*")), "a directory was left behind"
    trainer = fit(module, tmp_path, mt.MegaTrainStrategy(max_ram_gb=smallest), **settings)
    stats = trainer.strategy.engine.stats  # type: ignore[attr-defined]
    assert stats.ram_peak_bytes <= smallest * 2**30
    expected = after(4, tmp_path, make_net(net, optimizer), **settings)
    assert_usable(module, expected)


def test_smallest_budget_also_loads_a_checkpoint(tmp_path: Path) -> None:
    trainer = fit(make_net("layers", "adafactor"), tmp_path, max_steps=8)  # one epoch
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    module = make_net("layers", "adafactor")
    strategy = mt.MegaTrainStrategy(max_ram_gb=smallest_gb(module, tmp_path))
    fit(module, tmp_path, strategy, max_steps=10, ckpt_path=tmp_path / "some.ckpt")
    plain = make_net("layers", "adafactor")
    fit(plain, tmp_path, max_steps=10, ckpt_path=tmp_path / "some.ckpt")
    assert_same(parameters_of(module), parameters_of(plain))


def test_second_fit_needs_no_more_than_the_smallest_budget(tmp_path: Path) -> None:
    module, plain = Net(), Net()
    strategy = mt.MegaTrainStrategy(max_ram_gb=smallest_gb(module, tmp_path))
    trainers = make_trainer(tmp_path, strategy), make_trainer(tmp_path)
    for each, trainer in zip((module, plain), trainers, strict=True):
        trainer.fit(each, loader())
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(0.5)
        trainer.fit_loop.epoch_loop.max_steps = 7
        trainer.fit(each, loader())
    assert_same(parameters_of(module), parameters_of(plain))


def test_a_model_of_meta_parameters_survives_a_refusal(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Net()
    module.scale = nn.Parameter(torch.ones(1, WIDTH))
    smallest = smallest_gb(module, tmp_path)
    fit(module, tmp_path, mt.MegaTrainStrategy(max_ram_gb=smallest))
    assert_usable(module, parameters_of(module))


def test_smallest_disk_works_and_less_is_refused(tmp_path: Path) -> None:
    module = Net()
    start, directory = parameters_of(module), tmp_path / "pages"
    with pytest.raises(mt.BudgetError, match="Raise max_disk_gb") as caught:
        fit(module, tmp_path, mt.MegaTrainStrategy(directory, max_disk_gb=1e-6))
    smallest = caught.value.smallest_gb
    assert smallest is not None
    assert f"{smallest:.6f}" in str(caught.value)
    assert_usable(module, start)
    assert not list(directory.glob("pages/*"))
    with pytest.raises(mt.BudgetError):
        fit(module, tmp_path, mt.MegaTrainStrategy(directory, max_disk_gb=0.95 * smallest))
    fit(module, tmp_path, mt.MegaTrainStrategy(directory, max_disk_gb=smallest))
    assert_usable(module, after(4, tmp_path))
