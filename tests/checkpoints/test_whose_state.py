"""The state of a run goes with the checkpoints that it belongs to, and with no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import mt_lightning as mt
from mt_lightning.plugins.linked import RUN_STATE
from mt_lightning.resume.packer import unpack

from .runs import Net, assert_same_tree, end_of, fit, linked, paged

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")


class Breaking(Net):
    """Breaks off behind its third step, before its batch ends."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del outputs, batch, batch_idx
        if self.global_step == 3:
            raise RuntimeError("behind the step")


class BreakingByHand(Breaking):
    """The same in the middle of a `training_step` that takes its steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.on_train_batch_end(None, batch, batch_idx)


def broken(tmp_path: Path, module: Net, durability: str) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that is saved after a failed fit, and what it holds."""
    trainers = []
    strategy = paged(tmp_path / "pages", durability=durability)
    module.on_fit_start = lambda: trainers.append(module.trainer)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="behind the step"):
        fit(tmp_path, strategy, module=module, io=linked())
    path = tmp_path / "some.ckpt"
    trainers[0].save_checkpoint(path)
    found = mt.PagedCheckpointIO().load_checkpoint(path)
    assert found["global_step"] == 3
    return path, found


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_a_step_whose_batch_broke_off_behind_it_goes_on_exactly(
    tmp_path: Path, durability: str
) -> None:
    path, _ = broken(tmp_path, Breaking(), durability)
    expected = end_of(fit(tmp_path, "auto"))
    actual = fit(tmp_path, paged(tmp_path / "again"), ckpt_path=path)
    assert_same_tree(end_of(actual), expected)


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_a_step_whose_batch_did_not_end_is_saved_without_the_state_of_the_one_before(
    tmp_path: Path, durability: str
) -> None:
    path, found = broken(tmp_path, BreakingByHand(), durability)
    assert "state" not in found.get(RUN_STATE, {})
    standard = tmp_path / "standard.ckpt"
    mt.PagedCheckpointIO().save_checkpoint(found, standard)
    by_hand = [BreakingByHand(), BreakingByHand()]
    for module in by_hand:
        module.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    expected = end_of(fit(tmp_path, "auto", module=by_hand[0], ckpt_path=standard))
    actual = fit(tmp_path, paged(tmp_path / "again"), module=by_hand[1], ckpt_path=path)
    assert_same_tree(end_of(actual), expected)


@pytest.mark.parametrize("format", ["lightning", "linked"])
def test_one_plugin_keeps_the_runs_of_two_trainers_apart(tmp_path: Path, format: Any) -> None:
    io = mt.PagedCheckpointIO(format)
    first = fit(tmp_path, paged(tmp_path / "a"), io=io, max_steps=2)
    second = fit(tmp_path, paged(tmp_path / "b", max_disk_gb=1), io=io, max_steps=5)
    for trainer, steps in ((first, 2), (second, 5)):
        path = tmp_path / f"{steps}.ckpt"
        trainer.save_checkpoint(path)
        found = io.load_checkpoint(path)
        assert found["global_step"] == steps
        loops = unpack(found[RUN_STATE]["state"])["loops"]
        assert loops["epoch_loop.batch_progress"]["total"]["completed"] == steps


class Failing(torch.optim.SGD):
    """Fails once it is told to."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if Failing.broken:
            raise OSError("the update fails")
        return super().step(closure)


@pytest.mark.parametrize("format", ["linked", "lightning"])
def test_weights_that_are_steps_behind_the_loops_are_not_saved(
    tmp_path: Path, format: Literal["linked", "lightning"]
) -> None:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            Failing.broken = False
            return Failing([p for p in self.parameters() if p.requires_grad], lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            del batch, batch_idx
            Failing.broken = self.global_step == 2

    module = Module()
    strategy = paged(tmp_path / "pages", durability="checkpoint")
    with pytest.raises(OSError, match="the update fails"):
        fit(tmp_path, strategy, module=module, io=mt.PagedCheckpointIO(format))
    assert strategy.engine is not None
    assert strategy.engine.num_lost == 2
    for weights_only in (False, True):
        with pytest.raises(mt.StepError, match="2 step"):
            module.trainer.save_checkpoint(tmp_path / "some.ckpt", weights_only=weights_only)
    assert not (tmp_path / "some.ckpt").exists()
