"""A NaN or infinite gradient in a middle step, under each `nonfinite`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mt_lightning as mt

from .nets import (
    Net,
    after,
    assert_fresh_run_works,
    assert_same,
    assert_usable,
    committed_step,
    fit,
    parameters_of,
    smallest_gb,
)

BAD_BATCH = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip by norm": {"gradient_clip_val": 0.1},
    "clip by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 2},
}


class Poisoned(Net):
    """One gradient of one layer is not finite in one batch; the loss is."""

    value = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.bad and x.requires_grad:
                x = x * 1.0
                x.register_hook(lambda grad: grad * self.value)
        return x * self.scale

    bad = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.bad = batch_idx == BAD_BATCH
        return super().training_step(batch, batch_idx)


class Infinite(Poisoned):
    value = float("inf")


class Skipping(Net):
    """What `nonfinite="skip"` shall be equal to: the bad window is not stepped."""

    window = 1

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        if batch_idx // self.window != BAD_BATCH // self.window:
            optimizer.step()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", [Poisoned, Infinite])
def test_propagate_is_what_plain_lightning_does(
    tmp_path: Path, kind: type[Net], setting: str
) -> None:
    module, plain, settings = kind(), kind(), SETTINGS[setting]
    fit(module, tmp_path, "megatrain", **settings)
    fit(plain, tmp_path, **settings)
    assert any(bool(p.isnan().any()) for p in plain.parameters()), "the test tests nothing"
    assert_same(parameters_of(module), parameters_of(plain))


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_skip_leaves_parameters_and_step_counts(tmp_path: Path, setting: str, tight: bool) -> None:
    module, plain, settings = Poisoned(), Skipping(), SETTINGS[setting]
    plain.window = settings.get("accumulate_grad_batches", 1)
    budget = smallest_gb(Net(), tmp_path, **settings) if tight else None
    strategy = mt.MegaTrainStrategy(max_ram_gb=budget, nonfinite="skip")
    trainer = fit(module, tmp_path, strategy, **settings)
    plain_trainer = fit(plain, tmp_path, **settings)
    assert_usable(module, parameters_of(plain))
    states = [t.optimizers[0].state_dict()["state"] for t in (trainer, plain_trainer)]
    for mine, theirs in zip(states[0].values(), states[1].values(), strict=True):
        assert mine["step"] == theirs["step"] == 3
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    assert strategy.engine is not None
    assert strategy.engine.stats.skipped_steps == 1


@pytest.mark.parametrize(
    ("kind", "setting"), [(Infinite, "plain"), *[(Poisoned, setting) for setting in SETTINGS]]
)
def test_raise_changes_nothing(tmp_path: Path, kind: type[Net], setting: str) -> None:
    module, settings = kind(), SETTINGS[setting]
    completed = BAD_BATCH // settings.get("accumulate_grad_batches", 1)
    strategy = mt.MegaTrainStrategy(tmp_path / "pages", nonfinite="raise")
    with pytest.raises(mt.StepError, match=rf"step {completed + 1}: .*nonfinite='skip'") as caught:
        fit(module, tmp_path, strategy, **settings)
    assert isinstance(caught.value, RuntimeError)
    assert committed_step(tmp_path / "pages") == completed
    assert_usable(module, after(completed, tmp_path, **settings))
    module.__class__ = Net
    assert_fresh_run_works(module, tmp_path, **settings)


class BadFirstLoss(Net):
    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().loss(batch, batch_idx) * (float("nan") if batch_idx == 0 else 1.0)


def test_a_nan_of_the_first_loss_propagates_too(tmp_path: Path) -> None:
    module, plain = BadFirstLoss(), BadFirstLoss()
    fit(module, tmp_path, "megatrain")
    fit(plain, tmp_path)
    assert_same(parameters_of(module), parameters_of(plain))
