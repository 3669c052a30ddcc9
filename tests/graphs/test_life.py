"""What a graph holds is given back, whatever becomes of it; and what it read must not change."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import mt_lightning as mt

from .nets import EXECUTIONS, NUM_LAYERS, NUM_STEPS, Nested, Net, assert_same, fit, smallest_gb

GIB = 1 << 30


class _NothingHeld(Callback):
    """Between two steps no graph holds memory, and no frame has a view outside a parameter."""

    def __init__(self) -> None:
        self.num_checks = 0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        run = strategy.engine.live.run
        run.graphs.collect()
        run.worker.drain()
        assert run.budget.by_purpose["graphs"] == 0
        assert not any(e.frame.in_use() for e in run.pool.entries() if e not in run.resident)
        self.num_checks += 1


@pytest.mark.parametrize("recompute", [True, "auto", False])
def test_a_kept_unit_runs_once(recompute: Any, tmp_path: Path) -> None:
    EXECUTIONS.clear()
    strategy = mt.MegaTrainStrategy(recompute=recompute, max_ram_gb=0.5)
    fit(Net(), tmp_path, strategy)
    times = 2 if recompute is True else 1
    assert len(EXECUTIONS) == times * NUM_STEPS * NUM_LAYERS
    assert strategy.engine is not None
    stats = strategy.engine.stats
    assert stats.graphs_kept == (0 if recompute is True else NUM_STEPS * NUM_LAYERS)
    assert stats.units_run == (0 if recompute is True else NUM_LAYERS)


def test_the_choice_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mt_lightning")
    fit(Net(), tmp_path, mt.MegaTrainStrategy(max_ram_gb=0.5))
    assert f"graphs kept for {NUM_LAYERS} of {NUM_LAYERS} units" in caplog.text


def test_false_that_finds_no_room_is_refused(tmp_path: Path) -> None:
    budget_gb = smallest_gb(Net, tmp_path)
    strategy = mt.MegaTrainStrategy(max_ram_gb=budget_gb, recompute=False)
    with pytest.raises(mt.BudgetError, match=r"max_ram_gb=.*recompute='auto'"):
        fit(Net(), tmp_path, strategy)


class Batch(Net):
    """Its first step is taken with a batch of a thousand rows."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch.repeat(100, 1) if batch_idx == 0 else batch)


def test_a_large_batch_is_computed_again_and_the_small_ones_after_it_kept(tmp_path: Path) -> None:
    expected, module = Batch(), Batch()
    fit(expected, tmp_path)
    strategy = mt.MegaTrainStrategy(max_ram_gb=0.006)
    fit(module, tmp_path, strategy)
    assert_same(module, expected)
    assert strategy.engine is not None
    stats = strategy.engine.stats
    assert (NUM_STEPS - 1) * NUM_LAYERS <= stats.graphs_kept < NUM_STEPS * NUM_LAYERS
    assert stats.ram_peak_bytes <= 0.006 * GIB


class Discarding(Net):
    """Runs forward for nothing, and breaks off between forward and backward, on odd batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 2:
            self.loss(batch)
            try:
                self._fail(self(batch))
            except ValueError:
                return None
        return self.loss(batch)

    def _fail(self, out: Tensor) -> None:
        raise ValueError(f"nothing to see in {out.shape}")


class Hooked(Net):
    """Backward breaks off inside the second unit of an odd batch; the user goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx % 2:
            out = self.layers[2](self._broken(self.layers[1](batch)))
            with pytest.raises(ValueError, match="on the way"):
                self.manual_backward(out.sum())
            del out
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def _broken(self, x: Tensor) -> Tensor:
        def fail(grad: Tensor) -> None:
            raise ValueError("on the way")

        x.register_hook(fail)
        return x


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("make", [Net, Nested, Discarding, Hooked])
@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_nothing_is_held_after_a_step(make: Any, durability: str, tmp_path: Path) -> None:
    expected, module, check = make(), make(), _NothingHeld()
    fit(expected, tmp_path)
    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        fit(
            module,
            tmp_path,
            mt.MegaTrainStrategy(recompute=False, max_ram_gb=0.5, durability=durability),  # pyright: ignore[reportArgumentType]
            callbacks=[check],
        )
    finally:
        gc.enable()
    assert_same(module, expected)
    assert check.num_checks == NUM_STEPS


class Late(Net):
    """Goes backward through a graph that is older than a step, or after a change in place."""

    change: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.change(batch, optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class AfterStep(Late):
    def change(self, batch: Tensor, optimizer: Any) -> None:
        self.manual_backward(self.loss(batch))
        optimizer.step()


class AfterWrite(Late):
    def loss(self, batch: Tensor) -> Tensor:
        self.inner = self.layers[1](batch)
        return super().loss(self.inner)

    def change(self, batch: Tensor, optimizer: Any) -> None:
        self.inner.mul_(2)


class AfterLoad(Late):
    def change(self, batch: Tensor, optimizer: Any) -> None:
        self.layers[1].load_state_dict(self.layers[2].state_dict())


@pytest.mark.parametrize("make", [AfterStep, AfterWrite, AfterLoad])
def test_backward_after_a_change_is_stopped_as_in_plain_torch(make: Any, tmp_path: Path) -> None:
    message = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        fit(make(), tmp_path)
    with pytest.raises(mt.StepError, match=message):
        fit(make(), tmp_path, mt.MegaTrainStrategy(recompute=False, max_ram_gb=0.5))


class Looking(Net):
    """Looks at what autograd has saved, outside of any backward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        hidden: Any = self.layers[0].up(batch) if batch_idx < 0 else None
        assert hidden is None
        loss = self.loss(batch)
        node: Any = self.find(loss.grad_fn, "AddmmBackward0")
        self.seen = [*getattr(self, "seen", []), node._saved_mat2.clone()]
        return loss

    def find(self, node: Any, name: str) -> Any:
        nodes = [node]
        while nodes:
            node = nodes.pop(0)
            if node.name() == name:
                return node
            nodes += [following for following, _ in node.next_functions if following is not None]
        raise AssertionError(name)


def test_saved_weights_may_be_looked_at(tmp_path: Path) -> None:
    expected, module = Looking(), Looking()
    fit(expected, tmp_path)
    fit(module, tmp_path, mt.MegaTrainStrategy(recompute=False, max_ram_gb=0.5))
    assert_same(module, expected)
    assert len(module.seen) == NUM_STEPS
    assert all(torch.equal(a, b) for a, b in zip(module.seen, expected.seen, strict=True))
