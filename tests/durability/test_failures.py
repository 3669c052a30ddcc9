"""What is left of a run with commits at checkpoints when something goes wrong."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

import mt_lightning as mt
from mt_lightning.tiers.doubles import Fault, FaultyStore

from ..resume.run import assert_goes_on_as, interrupt, resume, train
from .nets import Tiny, adamw, assert_same, committed_step, fit, paged


class BrokenError(Exception):
    """What the user's code raises."""


class Breaks(Tiny):
    """Fails in the middle of a backward pass, when some layers have their gradients."""

    after = 4

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.after:
            handle = self.layers[1].up.register_forward_hook(self.fail)
            self.trainer.callbacks.append(_Removes(handle))
        return loss

    def fail(self, *_: Any) -> None:
        raise self.error


class _Removes(Callback):
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def on_exception(self, *_: Any) -> None:
        self.handle.remove()


@pytest.mark.parametrize("clip", [None, 0.5], ids=["usual", "clipped"])
@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
def test_a_step_that_breaks_off_costs_that_step_alone(
    tmp_path: Path, error: type[BaseException], clip: float | None
) -> None:
    module = Breaks(adamw)
    module.error = error
    with pytest.raises((BrokenError, SystemExit, KeyboardInterrupt)):
        fit(module, paged(tmp_path, recompute=True), gradient_clip_val=clip)
    assert committed_step(tmp_path) == 4
    plain = Tiny(adamw)
    fit(plain, max_steps=4, gradient_clip_val=clip)
    assert_same(module, plain)


@pytest.mark.parametrize("stop", [3, 9])
def test_an_interrupted_run_goes_on(tmp_path: Path, stop: int) -> None:
    paging = {"durability": "checkpoint"}
    expected = train("auto")
    interrupt(tmp_path, stop, paging)
    assert assert_goes_on_as(expected, resume(tmp_path, paging)) == stop


class Raising(torch.optim.AdamW):
    """Fails in its third step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.shape == (128, 32):
                    count = self.state[param].get("step", torch.tensor(0.0))
                    if int(count) == 3:
                        raise BrokenError
        return super().step(closure)


def test_an_update_that_fails_goes_back_to_the_last_commit_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Tiny(lambda module: Raising(module.parameters(), lr=1e-2))
    start = Tiny(adamw)
    strategy = paged(tmp_path)
    with pytest.raises(BrokenError), caplog.at_level(logging.WARNING):
        fit(module, strategy)
    trainer = module.trainer
    assert "last commit (step 0): 4 step(s) are lost" in caplog.text
    assert "on_existing='resume'" in caplog.text
    assert_same(module, start)
    # The loops of this trainer are at step 4: it must not go on with these weights.
    with pytest.raises(mt.ConfigError, match=r"4 step\(s\) behind.*on_existing='resume'"):
        trainer.fit(module)
    module.make = adamw
    del trainer, strategy
    module.trainer.strategy._close()
    gc.collect()
    fit(module, paged(tmp_path, on_existing="resume"))
    plain = Tiny(adamw)
    fit(plain)
    assert_same(module, plain)


class Saves(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "never.ckpt")


@pytest.mark.parametrize(("file", "nth"), [("*.weight.1", 2), ("*.state.0", 0)])
def test_a_drive_that_fails_while_pages_are_written_back(
    tmp_path: Path, file: str, nth: int
) -> None:
    fault = Fault(op="write", kind="eio", name_pattern=file, nth=nth, times=1000)
    module = Tiny(adamw)
    strategy = paged(tmp_path / "pages", _wrap_store=lambda store: FaultyStore(store, [fault]))
    with pytest.raises(mt.StorageError, match="Input/output error"):
        fit(module, strategy, callbacks=[Saves()], default_root_dir=tmp_path)
    assert committed_step(tmp_path / "pages") == 0
    assert_same(module, Tiny(adamw))
