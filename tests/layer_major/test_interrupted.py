"""A window that is interrupted leaves nothing behind, and a run goes on from the step before it."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from mt_lightning import MegaTrainStrategy
from mt_lightning.engine.window.micro import Micro
from mt_lightning.errors import ConfigError, StepError

from . import networks as nets
from .run import Batch, Subject, assert_same, fit

BATCHES = nets.tokens(16, [9, 16, 12, 5])

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")
    torch.set_num_threads(1)


class Failing(Subject):
    """Fails in the tenth step, half-way through its units, once."""

    fails = True

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 9 and self.fails:
            self.network.blocks[1].register_forward_pre_hook(_fail)
        return super().training_step(batch, batch_idx)


def _fail(*_: Any) -> None:
    raise RuntimeError("step 10 failed")


class Stops(pl.Callback):
    """Ends the process, so to say, in the middle of the third window."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 9:
            raise SystemError("killed")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("interruption", "dropout", "clip"),
    [
        ("kill", 0.0, 0.1),
        ("kill", 0.1, None),
        ("error", 0.0, None),
        ("error", 0.1, 0.1),
        slow("kill", 0.0, None),
        slow("kill", 0.1, 0.1),
        slow("error", 0.0, 0.1),
        slow("error", 0.1, None),
    ],
)
def test_a_run_goes_on_from_the_step_before(
    interruption: str, dropout: float, clip: float | None, tmp_path: Path
) -> None:
    make = nets.Tiny if interruption == "error" else nets.zoo_model("gpt", dropout=dropout)
    batches = BATCHES if not dropout else nets.tokens(16, [12])
    settings = {"accumulate_grad_batches": 4, "gradient_clip_val": clip}
    expected = fit(tmp_path, make, batches, None, **settings)
    pages = tmp_path / "pages"
    first = MegaTrainStrategy(offload_dir=pages, layer_major=True)
    if interruption == "kill":
        with pytest.raises(SystemError, match="killed"):
            fit(tmp_path, make, batches, first, callbacks=(Stops(),), **settings)
    else:
        with pytest.raises(RuntimeError, match="step 10 failed"):
            fit(tmp_path, make, batches, first, subject=Failing, **settings)
    assert first.engine is not None
    assert not first.engine.attached
    del first
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Micro and not each.dead]
    again = MegaTrainStrategy(offload_dir=pages, layer_major=True, on_existing="resume")
    found = fit(tmp_path, make, batches, again, **settings)
    for name in ("weights", "moments", "rng", "global_step"):
        assert_same(expected[name], found[name], name)


class Held(pl.Callback):
    """Looks at what is reserved when an exception has ended a window."""

    pins: int | None = None
    by_purpose: dict[str, int]

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        run = trainer.strategy.engine.live.run
        run.steps._worker.drain()  # updates of the step before hold their pages
        resident = set(run.build.resident)
        entries = run.pool._entries.values()
        self.pins = sum(e.pins for e in entries if e.page.index not in resident)
        self.by_purpose = dict(run.budget.by_purpose)
        assert trainer.strategy.engine.live.window.sums is None
        assert gc.isenabled()
        assert torch.is_grad_enabled()


def test_an_error_in_one_step_leaves_no_page_pinned(tmp_path: Path) -> None:
    held = Held()
    strategy = MegaTrainStrategy(layer_major=True)
    with pytest.raises(RuntimeError, match="step 10 failed"):
        fit(
            tmp_path,
            nets.Tiny,
            BATCHES,
            strategy,
            subject=Failing,
            callbacks=(held,),
            accumulate_grad_batches=4,
        )
    assert held.pins == 0
    # The traceback still holds the graph of the step that failed, and of no other one.
    most = max(batch["input_ids"].numel() for batch in BATCHES)
    assert held.by_purpose.get("unit inputs", 0) <= most * (8 + 4 * 64 * 4)


class Reads(pl.Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert outputs["loss"] is not None


def test_a_loss_that_is_not_known_yet_is_never_made_up(tmp_path: Path) -> None:
    strategy = MegaTrainStrategy(layer_major=True)
    with pytest.raises(StepError, match=r"outputs\['loss'\] is not known yet"):
        fit(
            tmp_path,
            nets.Tiny,
            BATCHES,
            strategy,
            callbacks=(Reads(),),
            accumulate_grad_batches=4,
        )


class OwnBackward(Subject):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_a_backward_of_the_module_is_refused(tmp_path: Path) -> None:
    strategy = MegaTrainStrategy(layer_major=True)
    with pytest.raises(ConfigError, match="backward"):
        fit(
            tmp_path,
            nets.Tiny,
            BATCHES,
            strategy,
            subject=OwnBackward,
            accumulate_grad_batches=4,
        )
