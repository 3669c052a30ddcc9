"""User code that raises in the middle of an epoch: nothing is lost that plain Lightning keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

import mt_lightning as mt

from .nets import (
    WIDTH,
    Net,
    after,
    assert_fresh_run_works,
    assert_usable,
    committed_step,
    fit,
    loader,
    make_trainer,
    parameters_of,
    smallest_gb,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "deferred": {"gradient_clip_val": 0.1},
    "accumulate": {"accumulate_grad_batches": 2},
    "accumulate and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}
BAD_BATCH = 5


class BrokenError(Exception):
    """What the user's code raises."""


def fail(*_: Any) -> Any:
    raise BrokenError


class InForward(Net):
    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx != BAD_BATCH:
            return super().loss(batch, batch_idx)
        handle = self.layers[1].linear.register_forward_hook(fail)
        try:
            return super().loss(batch, batch_idx)
        finally:
            handle.remove()


class InBackward(Net):
    """Fails when a part of the gradient has arrived, in the middle of a unit."""

    layer = 1

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == self.layer and getattr(self, "bad", False):
                x = x * 1.0
                x.register_hook(fail)
            x = layer(x)
        return x * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.bad = batch_idx == BAD_BATCH
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.bad = False


class InReplay(Net):
    """Fails when backward runs the unit again."""

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().loss(batch, batch_idx)
        if batch_idx == BAD_BATCH:
            self.handle = self.layers[1].linear.register_forward_hook(fail)
        return loss

    def on_fit_end(self) -> None:
        raise AssertionError("the hook was not called")


class AfterBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self.trainer.fit_loop.epoch_loop.batch_idx == BAD_BATCH:
            raise BrokenError


class AtBatchEnd(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD_BATCH:
            raise BrokenError


class InTrainingStep(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == BAD_BATCH:
            raise BrokenError
        return super().training_step(batch, batch_idx)


def places() -> Iterator[Any]:
    """Yield every place with every setting; half of them run always."""
    settings = [("eager", False), *[(setting, True) for setting in SETTINGS]]
    kinds = [InForward, InBackward, InReplay, AfterBackward, AtBatchEnd, InTrainingStep]
    for i, kind in enumerate(kinds):
        for j, (setting, tight) in enumerate(settings):
            marks = [pytest.mark.slow] if (i + j) % 2 else []
            yield pytest.param(kind, setting, tight, marks=marks)


@pytest.mark.parametrize(("kind", "setting", "tight"), list(places()))
def test_parameters_are_those_of_the_last_completed_step(
    tmp_path: Path, kind: type[Net], setting: str, tight: bool
) -> None:
    settings = SETTINGS[setting]
    window = settings.get("accumulate_grad_batches", 1)
    completed = (BAD_BATCH + (kind is AtBatchEnd)) // window
    module = kind()
    budget = smallest_gb(Net(), tmp_path, **settings) if tight else None
    strategy = mt.MegaTrainStrategy(
        tmp_path / "pages",
        max_ram_gb=budget,
        durability="step",
        recompute=True if kind is InReplay else "auto",
    )
    with pytest.raises(BrokenError):
        fit(module, tmp_path, strategy, max_steps=8, **settings)
    assert committed_step(tmp_path / "pages") == completed
    if kind is InReplay:
        module.handle.remove()
    assert_usable(module, after(completed, tmp_path, **settings))
    if not tight:
        module.__class__ = Net
        assert_fresh_run_works(module, tmp_path, **settings)


@pytest.mark.parametrize("setting", ["eager", "deferred"])
def test_the_same_trainer_goes_on(tmp_path: Path, setting: str) -> None:
    """As in a notebook: fix the data, call fit again."""
    settings = SETTINGS[setting]
    module = InForward()
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(), max_steps=8, **settings)
    with pytest.raises(BrokenError):
        trainer.fit(module, loader())
    plain = InForward()
    plain_trainer = make_trainer(tmp_path, max_steps=8, **settings)
    with pytest.raises(BrokenError):
        plain_trainer.fit(plain, loader())
    module.__class__ = plain.__class__ = Net
    trainer.fit(module, loader())
    plain_trainer.fit(plain, loader())
    assert_usable(module, parameters_of(plain))


class Interrupted(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == BAD_BATCH:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("setting", SETTINGS)
def test_keyboard_interrupt(tmp_path: Path, setting: str) -> None:
    settings = SETTINGS[setting]
    module = Interrupted()
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"), **settings)
    trainer.fit_loop.epoch_loop.max_steps = 8
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module, loader())
    completed = BAD_BATCH // settings.get("accumulate_grad_batches", 1)
    assert committed_step(tmp_path / "pages") == completed
    assert_usable(module, after(completed, tmp_path, **settings))


class _RaisesAtStepHook(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            raise BrokenError


@pytest.mark.parametrize("setting", ["eager", "deferred"])
def test_callback_that_raises_just_before_the_step(tmp_path: Path, setting: str) -> None:
    module, settings = Net(), SETTINGS[setting]
    strategy = mt.MegaTrainStrategy(tmp_path / "pages")
    with pytest.raises(BrokenError):
        fit(module, tmp_path, strategy, callbacks=[_RaisesAtStepHook()], **settings)
    assert committed_step(tmp_path / "pages") == 2
    assert_usable(module, after(2, tmp_path, **settings))


class _RaisingSGD(torch.optim.SGD):
    """Fails in its third step on parameters of one shape."""

    shape: tuple[int, ...]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    count = self.state[param].get("count", 0)
                    if count == 2 and tuple(param.shape) == self.shape:
                        raise BrokenError
                    self.state[param]["count"] = count + 1
                    param.sub_(param.grad, alpha=group["lr"])


class _WithTail(Net):
    """Ends with a module so small that it stays in memory and is updated at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.tail(x).mean()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "shape",
    [(1, WIDTH), (WIDTH, 2 * WIDTH), (3, WIDTH)],
    ids=["first in memory", "paged", "last in memory"],
)
def test_optimizer_that_raises(tmp_path: Path, setting: str, shape: tuple[int, ...]) -> None:
    settings = SETTINGS[setting]
    module = _WithTail()
    optimizer = type("Raising", (_RaisingSGD,), {"shape": shape})
    module.configure_optimizers = lambda: optimizer(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    strategy = mt.MegaTrainStrategy(tmp_path / "pages", durability="step")
    with pytest.raises(BrokenError):
        fit(module, tmp_path, strategy, **settings)
    assert committed_step(tmp_path / "pages") == 2
    plain = _WithTail()
    plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), lr=0.1)  # type: ignore[method-assign]
    assert_usable(module, after(2, tmp_path, plain, **settings))


class _Tolerant(Net):
    """Manual optimisation that skips a batch which fails, as people do when memory runs out."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.where = where
        self.num_failed = 0

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == 1 and self.bad == "backward":
                x = x * 1.0
                x.register_hook(fail)
            if index == 1 and self.bad == "forward":
                raise BrokenError
            x = layer(x)
        return x * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.bad = self.where if batch_idx == 2 else None
        optimizer = self.optimizers()
        optimizer.zero_grad()
        try:
            self.manual_backward(self.loss(batch, batch_idx))
        except BrokenError:
            self.num_failed += 1
            optimizer.zero_grad()
            return
        finally:
            self.bad = None
        optimizer.step()

    bad: str | None = None


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    "where",
    ["forward", "backward"],
)
def test_batch_that_fails_and_is_skipped_by_the_user(
    tmp_path: Path, where: str, tight: bool
) -> None:
    module, plain = _Tolerant(where), _Tolerant(where)
    fit(plain, tmp_path, max_steps=6)
    budget = smallest_gb(_Tolerant(where), tmp_path) if tight else None
    strategy = mt.MegaTrainStrategy(max_ram_gb=budget)
    fit(module, tmp_path, strategy, max_steps=6)
    assert module.num_failed == plain.num_failed == 1
    assert_usable(module, parameters_of(plain))
