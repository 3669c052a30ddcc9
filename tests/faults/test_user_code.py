"""Modules that do what paging cannot follow are stopped, with the way out; never trained wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import mt_lightning as mt

from .nets import (
    WIDTH,
    Net,
    after,
    assert_fresh_run_works,
    assert_same,
    assert_usable,
    committed_step,
    fit,
    parameters_of,
)


def stopped(module: Net, root: Path, completed: int = 0, **settings: Any) -> str:
    """Return the message of the StepError; check that nothing of the step was applied."""
    expected = parameters_of(module) if not completed else after(completed, root, **settings)
    with pytest.raises(mt.StepError) as caught:
        fit(module, root, mt.MegaTrainStrategy(root / "pages"), **settings)
    assert committed_step(root / "pages") == completed
    module.__class__ = Net
    module.automatic_optimization = True
    assert_usable(module, expected)
    assert_fresh_run_works(module, root)
    return str(caught.value)


# --- weights read outside their unit ------------------------------------------------------------


class Functional(Net):
    """Reads a weight itself; the unit that holds it never runs."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        x = F.linear(x, self.layers[0].linear.weight)
        return x[:, :WIDTH] * self.scale


class FunctionalToo(Net):
    """Reads a weight itself, of a unit that also runs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self.layers[1].linear.weight)[:, :WIDTH])


class Penalty(Net):
    """Adds the norm of all weights to the loss, as a regulariser would."""

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().loss(batch, batch_idx) + 1e-3 * sum(
            p.pow(2).sum() for p in self.parameters()
        )


class LatePenalty(Penalty):
    """Does so from the third batch on."""

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (super() if batch_idx >= 2 else super(Penalty, self)).loss(batch, batch_idx)


class Hidden(Net):
    """Reads a weight where a NaN does not show in the loss."""

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        weight = self.layers[1].linear.weight
        return super().loss(batch, batch_idx) + torch.nan_to_num(weight.pow(2).sum()) * 1e-3


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}], ids=["eager", "deferred"])
@pytest.mark.parametrize(
    ("kind", "name", "completed"),
    [
        (Functional, "layers.0.linear.weight", 0),
        (FunctionalToo, "layers.1.linear.weight", 0),
        (Penalty, "layers.0.linear.weight", 0),
        (LatePenalty, "layers.0.linear.weight", 2),
        (Hidden, "layers.1.linear.weight", 0),
    ],
)
def test_weight_read_outside_its_unit(
    tmp_path: Path, kind: type[Net], name: str, completed: int, settings: Any
) -> None:
    message = stopped(kind(), tmp_path, completed, **settings)
    assert name in message
    assert "resident=[" in message


@pytest.mark.parametrize(
    ("kind", "resident", "settings"),
    [
        (Functional, "layers.0", {}),
        (FunctionalToo, "layers.1.linear", {"gradient_clip_val": 0.1}),
        (FunctionalToo, "linear", {"precision": "bf16-mixed"}),
        (Penalty, ["layers"], {}),
    ],
)
def test_weight_that_stays_in_memory_may_be_read_outside_its_unit(
    tmp_path: Path, kind: type[Net], resident: Any, settings: Any
) -> None:
    plain, module = kind(), kind()
    fit(plain, tmp_path, **settings)
    strategy = mt.MegaTrainStrategy(tmp_path / "pages", resident=resident)
    fit(module, tmp_path, strategy, **settings)
    assert_same(parameters_of(module), parameters_of(plain))


class Clamped(Net):
    """Clamps weights after each step, as a critic may."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for param in self.layers[1].parameters():
                param.clamp_(-0.01, 0.01)


def test_writing_to_a_weight_that_is_away_raises(tmp_path: Path) -> None:
    module = Clamped()
    with pytest.raises(RuntimeError, match="single memory location"):
        fit(module, tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    assert_usable(module, after(1, tmp_path))


class ReplacedData(Net):
    """Replaces `param.data` after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        for param in self.layers[1].parameters():
            param.data = torch.full_like(param, 0.01)


def test_replacing_the_data_of_a_weight_is_not_ignored(tmp_path: Path) -> None:
    module, plain = ReplacedData(), ReplacedData()
    fit(plain, tmp_path)
    with contextlib.suppress(mt.StepError):
        fit(module, tmp_path, "megatrain")
        assert_same(parameters_of(module), parameters_of(plain))


# --- gradients ----------------------------------------------------------------------------------


class _ClipsItself(Net):
    """Clips in the hook where people do it, by the function as it is imported here or by path."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip()

    def clip(self) -> None:
        raise NotImplementedError


class ClipsByPath(_ClipsItself):
    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipsByName(_ClipsItself):
    def clip(self) -> None:
        clip_grad_norm_(self.parameters(), 0.1)


class ClipsOneByName(_ClipsItself):
    def clip(self) -> None:
        clip_grad_norm_(self.layers[2].linear.weight, max_norm=0.1)


class ClipsByValue(_ClipsItself):
    def clip(self) -> None:
        clip_grad_value_(parameters=list(self.layers.parameters()), clip_value=0.1)


class ClipsByOldName(_ClipsItself):
    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm(self.parameters(), 0.1)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.clip_grad_norm` is now deprecated")
@pytest.mark.parametrize(
    "kind", [ClipsByPath, ClipsByName, ClipsOneByName, ClipsByValue, ClipsByOldName]
)
def test_clipping_by_torch_functions(tmp_path: Path, kind: type[Net]) -> None:
    message = stopped(kind(), tmp_path)
    assert "Trainer(gradient_clip_val=...)" in message
    assert "clip_grad_" in message


class ClipsOther(_ClipsItself):
    def clip(self) -> None:
        other = nn.Parameter(torch.ones(3))
        other.grad = torch.full((3,), 100.0)
        assert clip_grad_norm_([other], 1.0) > 100
        assert other.grad.norm() < 1.01
        assert clip_grad_norm_((p for p in [other]), max_norm=1.0) < 1.01
        clip_grad_value_(other, 0.1)
        assert other.grad.max() <= 0.1


def test_clipping_something_else_works_during_a_run(tmp_path: Path) -> None:
    module = ClipsOther()
    fit(module, tmp_path, "megatrain")
    assert_usable(module, after(4, tmp_path))


def test_clipping_works_after_a_run(tmp_path: Path) -> None:
    module = Net()
    fit(module, tmp_path, "megatrain")
    module(torch.ones(2, WIDTH)).sum().backward()
    assert clip_grad_norm_(module.parameters(), 1e-3) > 0


class _Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NeverCleared(_Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx))
        self.optimizers().step()


def test_missing_zero_grad(tmp_path: Path) -> None:
    message = stopped(NeverCleared(), tmp_path, completed=1)
    assert "Call optimizer.zero_grad()" in message


class ClipsTwice(_Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        for value in (1.0, 0.1):
            self.clip_gradients(optimizer, value, gradient_clip_algorithm="norm")
        optimizer.step()


def test_clipping_twice(tmp_path: Path) -> None:
    assert "clipped twice" in stopped(ClipsTwice(), tmp_path)


class BackwardTwice(_Manual):
    """Two losses, two backward passes, one step: plain accumulation."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch, batch_idx)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


def test_backward_twice_through_one_graph(tmp_path: Path) -> None:
    module, plain = BackwardTwice(), BackwardTwice()
    fit(module, tmp_path, "megatrain")
    fit(plain, tmp_path)
    assert_same(parameters_of(module), parameters_of(plain))


class NewParameter(Net):
    """Gets a parameter in the middle of a run."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.layers[0].extra = nn.Parameter(torch.ones(WIDTH))


def test_parameter_that_appears_while_training(tmp_path: Path) -> None:
    module = NewParameter()
    fit(module, tmp_path, "megatrain")
    assert torch.equal(module.layers[0].extra, torch.ones(WIDTH))  # type: ignore[arg-type]
    fit(module, tmp_path, "megatrain")
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
