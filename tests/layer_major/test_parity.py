"""`layer_major=True` gives, bit for bit, what plain Lightning gives by accumulation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from mt_lightning import MegaTrainStrategy
from mt_lightning.engine.inputs.files import InputFiles
from mt_lightning.engine.window import tail, window
from mt_lightning.errors import BudgetError

from . import networks as nets
from .run import Batch, Subject, assert_same, fit

LENGTHS = [9, 16, 12, 5]
VARIED = nets.tokens(9, LENGTHS)
EVEN = nets.tokens(9, [12])
CASES: dict[str, tuple[Callable[[], nn.Module], list[Batch]]] = {
    "tiny": (nets.Tiny, VARIED),
    "branching": (nets.Branching, VARIED),
    "flag_toggled_around_the_pass": (nets.Flagged, VARIED),
    "loss_stashed_on_modules": (nets.Stashing, VARIED),
    "gpt_with_dropout": (nets.zoo_model("gpt", dropout=0.1), EVEN),
    "qwen3_moe": (nets.zoo_model("qwen3_moe"), VARIED),
    "mixtral": (nets.zoo_model("mixtral"), VARIED),
    "packed": (nets.zoo_model("llama"), nets.packed(9)),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")
    torch.set_num_threads(1)


def check(directory: Path, make: Any, batches: list[Batch], **settings: Any) -> Any:
    """Compare both orders; return the strategy of the paged run."""
    paging = settings.pop("paging", {})
    expected = fit(directory, make, batches, None, **settings)
    strategy = MegaTrainStrategy(layer_major=True, **paging)
    found = fit(directory, make, batches, strategy, **settings)
    assert_same(expected, found)
    return strategy


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("num_accumulated", [1, 3, 7, *map(slow, (2, 4))])
def test_llama_of_varying_lengths(num_accumulated: int, tmp_path: Path) -> None:
    check(
        tmp_path,
        nets.zoo_model("llama"),
        VARIED,
        accumulate_grad_batches=num_accumulated,
        max_epochs=2,
    )


# The other mixture of experts runs here always, this one in the check of "auto".
@pytest.mark.parametrize("case", [slow(case) if case == "mixtral" else case for case in CASES])
def test_models(case: str, tmp_path: Path) -> None:
    check(tmp_path, *CASES[case], accumulate_grad_batches=3, max_epochs=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"val_check_interval": 2},
        {"paging": {"optimizer_compression": "lossless"}},
        {"paging": {"nonfinite": "skip"}},
        {"max_steps": 4, "max_epochs": 9},
        {"profiler": "simple"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    check(
        tmp_path,
        nets.Tiny,
        VARIED,
        accumulate_grad_batches=4,
        val_batches=nets.tokens(2, [7], seed=5),
        **{"max_epochs": 2, **settings},
    )


def test_accumulation_that_changes(tmp_path: Path) -> None:
    found = []
    for strategy in (None, MegaTrainStrategy(layer_major=True)):
        scheduler = GradientAccumulationScheduler({0: 1, 1: 4, 3: 2})
        settings: dict[str, Any] = {"callbacks": (scheduler,), "max_epochs": 4}
        found.append(fit(tmp_path, nets.Tiny, VARIED, strategy, **settings))
    assert_same(*found)


class Skipping(Subject):
    """Some steps have no loss, the last one of a window among them."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 5, 7) else loss


class Detailed(Subject):
    """Steps return more than a loss, and log before and after it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        assert batch_idx == self.trainer.fit_loop.batch_idx
        self.log("begun", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)
        loss = super().training_step(batch, batch_idx)
        assert batch_idx == self.trainer.fit_loop.batch_idx
        return {"loss": loss, "number": batch_idx}


@pytest.mark.parametrize("subject", [Skipping, Detailed])
def test_steps(subject: type[Subject], tmp_path: Path) -> None:
    check(tmp_path, nets.Tiny, VARIED, accumulate_grad_batches=4, max_epochs=2, subject=subject)


def frozen() -> nn.Module:
    network = nets.Tiny()
    network.embed.requires_grad_(False)
    network.blocks[1].up.requires_grad_(False)
    return network


def smallest_gb(directory: Path, make: Callable[[], nn.Module], **settings: Any) -> float:
    strategy = MegaTrainStrategy(layer_major=True, max_ram_gb=1e-5)
    with pytest.raises(BudgetError) as refusal:
        fit(directory, make, EVEN, strategy, **settings)
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[float, ...]]] = {
    "deep": (functools.partial(nets.Tiny, num_layers=6), (0, 0.15, 0.32)),
    "frozen": (frozen, (0, 0.1, 0.2)),
}


def small_budgets() -> Iterator[Any]:
    """Yield all of them; with each budget either net and either clipping run always."""
    for i, (num_fitting, disk) in enumerate([(0, False), (2, False), (2, True), (4, False)]):
        for j, kind in enumerate(SMALL):
            for clip in (None, 0.1):
                case = (kind, num_fitting, disk, clip)
                yield case if (clip is None) == ((i + j) % 2 == 0) else slow(*case)


@pytest.mark.parametrize(("kind", "num_fitting", "disk", "clip"), list(small_budgets()))
def test_small_budgets(
    kind: str,
    num_fitting: int,
    disk: bool,
    clip: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, inputs_mib = SMALL[kind]
    settings = {"accumulate_grad_batches": 4, "gradient_clip_val": clip}
    max_ram_gb = smallest_gb(tmp_path, make, **settings) + inputs_mib[num_fitting // 2] / 1024
    sizes: list[int] = []

    def noted(self: window.Window, num_micros: int | None, on_loss: Any) -> Any:
        sizes.append(len(self.micros[:num_micros]))
        return run(self, num_micros, on_loss)

    run = window.Window.run
    monkeypatch.setattr(window.Window, "run", noted)
    if not disk:
        monkeypatch.setattr(InputFiles, "room_bytes", lambda self: 0)
    strategy = check(tmp_path, make, VARIED, paging={"max_ram_gb": max_ram_gb}, **settings)
    # None where the inputs of two batches have no room, several groups where those of four do not
    # and the disk has no room either.
    if not num_fitting:
        assert sizes == []
    elif clip is None:
        assert sizes == ([4] if disk else {2: [2, 2], 4: [4]}[num_fitting])
        assert bool(strategy.engine.stats.inputs_spilled_bytes) == disk
    assert strategy.engine.stats.reloads
    assert strategy.engine.stats.ram_peak_bytes <= max_ram_gb * 2**30


class Tied(nets.Tiny):
    """Head and table share a parameter: two units add to its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class CalledTwice(nets.Tiny):
    """The first block runs once more after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


class Counting(nets.Tiny):
    """Blocks keep running statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(Channels(64))


class Channels(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


@pytest.mark.parametrize("make", [Tied, CalledTwice, Counting])
def test_these_differ_by_rounding_only(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    # The first window takes the usual order; the second one begins with the same weights.
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 2}
    expected = fit(tmp_path, make, VARIED, None, **settings)
    found = fit(tmp_path, make, VARIED, MegaTrainStrategy(layer_major=True), **settings)
    for name in ("losses", "events", "buffers", "rng"):
        assert_same(expected[name], found[name], name)
    for name, moment in expected["moments"].items():
        gap = (moment - found["moments"][name]).double().norm()
        assert gap <= 1e-6 * moment.double().norm(), name


@pytest.mark.parametrize("case", ["tiny", "loss_stashed_on_modules", "mixtral", "packed"])
def test_logits_of_one_batch_exist_at_a_time(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every loss can be differentiated to the entry of its last unit when it is there.
    def never(loss: torch.Tensor) -> Any:
        raise AssertionError("the whole graph waits for the end of the window")

    monkeypatch.setattr(tail, "whole", never)
    monkeypatch.setattr(window, "whole", never)
    make, batches = CASES[case]
    strategy = MegaTrainStrategy(layer_major=True)
    fit(tmp_path, make, batches, strategy, accumulate_grad_batches=4)


@pytest.mark.parametrize("num_layers", [3, pytest.param(24, marks=pytest.mark.slow), 9])
def test_the_smallest_budget_does_not_grow_with_depth(num_layers: int, tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 4}
    smallest = smallest_gb(tmp_path, nets.Tiny, **settings)
    make = functools.partial(nets.Tiny, num_layers=num_layers)
    assert smallest_gb(tmp_path, make, **settings) == smallest
    strategy = MegaTrainStrategy(layer_major=True, max_ram_gb=smallest)
    fit(tmp_path, make, VARIED, strategy, **settings)
    assert strategy.engine is not None
    assert strategy.engine.stats.ram_peak_bytes <= smallest * 2**30
