"""The check of `layer_major="auto"`: what it costs, what it needs, and how long it holds."""

from __future__ import annotations

import dataclasses
import gc
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from mt_lightning import MegaTrainStrategy
from mt_lightning.callbacks.tables import plan_table
from mt_lightning.engine.inputs.files import InputFiles
from mt_lightning.engine.window.comparison import Comparison
from mt_lightning.errors import StorageError
from mt_lightning.layer_major.first_window import FirstWindow

from ..bytes import gpt
from ..bytes.cases import gpt_case
from . import networks as nets
from . import odd_networks as odd
from .auto import check_auto, fit_auto, order_of, tight_gb
from .run import Batch, Subject, assert_same, fit

BATCHES = nets.tokens(16, [9, 16, 12, 5])
SETTINGS: dict[str, Any] = {"accumulate_grad_batches": 4}

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")
    torch.set_num_threads(1)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches each check ran again."""
    replays: list[int] = []
    replay = FirstWindow._replay

    def counted(self: FirstWindow, comparison: Comparison) -> None:
        replays.append(len(self._steps))
        replay(self, comparison)

    monkeypatch.setattr(FirstWindow, "_replay", counted)
    return replays


class Stops(pl.Callback):
    """Ends the process, so to say, in the middle of the third window."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 9:
            raise SystemError("killed")


def interrupted(directory: Path, make: Any, max_ram_gb: float, batches: list[Batch]) -> Path:
    pages = directory / "pages"
    first = MegaTrainStrategy(offload_dir=pages, max_ram_gb=max_ram_gb, durability="step")
    with pytest.raises(SystemError, match="killed"):
        fit(directory, make, batches, first, callbacks=(Stops(),), **SETTINGS)
    del first
    gc.collect()
    return pages


@pytest.mark.parametrize(
    "make", [pytest.param(nets.Tiny, marks=pytest.mark.slow), odd.Tied, odd.GloballyFlagged]
)
def test_a_resumed_run_keeps_the_verdict(make: Any, tmp_path: Path, checked: list[int]) -> None:
    expected, strategy = fit_auto(tmp_path, make, BATCHES, **SETTINGS)
    assert len(checked) == 1
    max_ram_gb = strategy.options.max_ram_gb
    assert max_ram_gb is not None
    pages = interrupted(tmp_path, make, max_ram_gb, BATCHES)
    assert len(checked) == 2
    again = MegaTrainStrategy(offload_dir=pages, max_ram_gb=max_ram_gb, on_existing="resume")
    found = fit(tmp_path, make, BATCHES, again, **SETTINGS)
    assert len(checked) == 2
    assert order_of(again) == order_of(strategy)
    for name in ("weights", "moments", "rng", "global_step"):
        assert_same(expected[name], found[name], name)


def test_the_verdict_does_not_outlive_the_model(tmp_path: Path, checked: list[int]) -> None:
    def model(dropout: float) -> Any:
        return nets.zoo_model("gpt", dropout=dropout)

    batches = nets.tokens(16, [12])
    max_ram_gb = tight_gb(tmp_path, model(0.1), batches, 1.0, **SETTINGS)
    pages = interrupted(tmp_path, model(0.1), max_ram_gb, batches)
    assert len(checked) == 1
    again = MegaTrainStrategy(offload_dir=pages, max_ram_gb=max_ram_gb, on_existing="resume")
    fit(tmp_path, model(0.2), batches, again, **SETTINGS)
    assert len(checked) == 2


def test_from_the_third_window_on_bytes_are_those_of_true(tmp_path: Path) -> None:
    num_micros, num_steps, width, num_layers, vocab = 4, 4, 64, 5, 300
    sizes: dict[str, Any] = {"depth": 2, "deferred": False, "micro_batches": num_micros}
    case = gpt_case(budget="smallest", **sizes)
    inputs = gpt.NUM_TOKENS * (8 + width * 4 * (num_layers + 1))
    room_bytes = max(vocab * width, 4 * width * width) * 4 + (num_micros + 1) * inputs
    case = dataclasses.replace(case, budget_bytes=case.smallest_bytes + room_bytes)
    moved = {}
    for order in (True, "auto", False):
        moved[order] = gpt.train(
            tmp_path / str(order),
            budget_bytes=case.budget_bytes,
            num_steps=num_steps,
            width=width,
            num_layers=num_layers,
            vocab=vocab,
            layer_major=order,
            **sizes,
        )
        assert moved[order].stats["ram_peak_bytes"] <= case.budget_bytes

    def steps(order: Any) -> list[tuple[int, int]]:
        ends = [(0, 0), *moved[order].bytes[num_micros - 1 : -1 : num_micros]]
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(ends, ends[1:], strict=False)]

    assert steps("auto")[2:] == steps(True)[2:]
    first, usual, later = steps("auto")[0][0], steps(False)[0][0], steps(True)[3][0]
    # The check costs about what one more window costs.
    assert usual < first < usual + 1.5 * later


class Expects(pl.Callback):
    """Notes what the engine expects a step to move, and what the start table shows."""

    def __init__(self) -> None:
        self.expected: list[tuple[int, int]] = []
        self.rows: list[str] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.engine
        self.expected.append(engine.expected_bytes_per_step())
        self.rows.append("\n".join(f"{a}: {b}" for a, _, b in engine.plan.rows()))
        plan_table(engine.plan)


def test_the_plan_tells_what_will_run(tmp_path: Path) -> None:
    expects = Expects()
    settings = {**SETTINGS, "callbacks": (expects,), "max_epochs": 2}
    _, strategy = fit_auto(tmp_path, nets.Tiny, BATCHES, **settings)
    assert strategy.engine is not None
    plan = strategy.engine.plan
    assert plan is not None
    before, after = expects.expected[0], expects.expected[-1]
    assert (before, after) == (plan.usual_traffic, plan.window_traffic)
    assert after[0] < before[0]
    assert "read per step, usual order: the first window" in expects.rows[0]
    assert "  unit by unit: the windows after it" in expects.rows[0]
    assert f"read per step: batches unit by unit: {plan.order_reason}" in expects.rows[-1]
    stats = strategy.engine.stats
    assert stats.bytes_read < 9 * after[0] + 2 * before[0]


# With clipping, gradients of the whole model are kept in RAM before inputs of units are.
@pytest.mark.parametrize(
    ("clip", "room_mib", "disk", "sizes"),
    [
        (None, 0.0, False, []),
        pytest.param(None, 0.15, False, [2], marks=pytest.mark.slow),
        (None, 0.15, True, [4]),
        (0.1, 0.3, False, []),
        (0.1, 1.0, False, [4]),
    ],
)
def test_a_group_is_compared(
    clip: float | None,
    room_mib: float,
    disk: bool,
    sizes: list[int],
    tmp_path: Path,
    checked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not disk:
        monkeypatch.setattr(InputFiles, "room_bytes", lambda self: 0)
    settings = {**SETTINGS, "gradient_clip_val": clip, "room_mib": room_mib}
    strategy = check_auto(tmp_path, Deep, nets.tokens(16, [12]), **settings)
    order, reason = order_of(strategy)
    assert checked == sizes
    if sizes:
        assert order == "layer-major", reason
        assert f"gradients of {sizes[0]} batches" in reason
    else:
        assert (order, reason) == ("usual", "groups of batches would move more bytes")


class Deep(nets.Tiny):
    def __init__(self) -> None:
        super().__init__(num_layers=6)


class Reads(pl.Callback):
    """Looks at the loss of every batch when it has ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 3 == 0:
            self.losses.append(float(outputs["loss"]))
        if batch_idx % 5 == 0:
            self.losses += [len(outputs), *map(float, outputs.values())]


def test_outputs_can_be_read_after_every_batch(tmp_path: Path) -> None:
    expected, found = Reads(), Reads()
    same = fit(tmp_path, nets.Tiny, BATCHES, None, callbacks=(expected,), **SETTINGS)
    other, strategy = fit_auto(tmp_path, nets.Tiny, BATCHES, callbacks=(found,), **SETTINGS)
    assert order_of(strategy)[0] == "layer-major"
    assert expected.losses == found.losses
    assert_same(same["weights"], other["weights"])


def test_a_drive_that_fails_in_the_check_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise StorageError("the drive is gone")

    monkeypatch.setattr(Comparison, "_compare", broken)
    with pytest.raises(StorageError, match="the drive is gone"):
        fit_auto(tmp_path, nets.Tiny, BATCHES, **SETTINGS)


class FailsInBackward(Subject):
    """The second time that a batch runs, its backward fails."""

    num_runs = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        type(self).num_runs += 1
        if type(self).num_runs == 6:
            self.network.blocks[1].register_forward_hook(_failing)
        return super().training_step(batch, batch_idx)


def _failing(module: Any, args: Any, y: torch.Tensor) -> None:
    if y.requires_grad:
        y.register_hook(_fail)


def _fail(grad: torch.Tensor) -> None:
    raise RuntimeError("backward failed")


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_backward_that_fails_in_the_check_leaves_nothing_behind(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "gradient_clip_val": clip}
    expected = fit(tmp_path, Deep, BATCHES, None, **settings)
    max_ram_gb = tight_gb(tmp_path, Deep, BATCHES, 1.0 if clip else 0.3, **settings)
    monkeypatch.setattr(FailsInBackward, "num_runs", 0)
    strategy = MegaTrainStrategy(max_ram_gb=max_ram_gb)
    found = fit(tmp_path, Deep, BATCHES, strategy, subject=FailsInBackward, **settings)
    order, reason = order_of(strategy)
    assert order == "usual"
    assert "it fails: RuntimeError: backward failed" in reason
    assert_same(expected, found)
    assert strategy.engine is not None
    assert strategy.engine.stats.ram_peak_bytes <= max_ram_gb * 2**30
