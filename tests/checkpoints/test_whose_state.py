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
    """Breaks off behind its third step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        del outputs, batch, batch_idx
        if self.global_step == 3:
            raise RuntimeError("behind the step")


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_a_step_whose_batch_did_not_end_is_saved_without_the_state_of_the_one_before(
    tmp_path: Path, durability: str
) -> None:
    trainers = []
    strategy = paged(tmp_path / "pages", durability=durability)
    module = Breaking()
    module.on_fit_start = lambda: trainers.append(module.trainer)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="behind the step"):
        fit(tmp_path, strategy, module=module, io=linked())
    path = tmp_path / "some.ckpt"
    trainers[0].save_checkpoint(path)
    found = mt.PagedCheckpointIO().load_checkpoint(path)
    assert found["global_step"] == 3
    assert "state" not in found.get(RUN_STATE, {})
    standard = tmp_path / "standard.ckpt"
    mt.PagedCheckpointIO().save_checkpoint(found, standard)
    expected = end_of(fit(tmp_path, "auto", ckpt_path=standard))
    actual = fit(tmp_path, paged(tmp_path / "again"), ckpt_path=path)
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
