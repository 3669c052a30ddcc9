"""`layer_major="auto"` runs unit by unit where that gives the same, else it says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from mt_lightning import MegaTrainStrategy
from mt_lightning.engine.window.comparison import Comparison
from mt_lightning.errors import BudgetError
from mt_lightning.layer_major import first_window

from . import networks as nets
from . import odd_networks as odd
from .auto import check_auto, fit_auto, order_of, tight_gb
from .run import Batch, Subject, assert_same, fit

VARIED = nets.tokens(13, [9, 16, 12, 5])
EVEN = nets.tokens(13, [12])
BIT_FOR_BIT = "are the same, bit for bit"

pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")
    torch.set_num_threads(1)


SAME: dict[str, tuple[Callable[[], nn.Module], list[Batch], float]] = {
    "tiny": (nets.Tiny, VARIED, 0.25),
    "llama": (nets.zoo_model("llama"), VARIED, 1.0),
    "mixtral": (nets.zoo_model("mixtral"), VARIED, 1.0),
    "gpt_with_dropout": (nets.zoo_model("gpt", dropout=0.1), EVEN, 1.0),
    "dropout_and_new_shapes": (nets.zoo_model("gpt", dropout=0.1), VARIED, 1.0),
    "branch": (nets.Branching, VARIED, 0.25),
    "flag_toggled_around_the_pass": (nets.Flagged, VARIED, 0.25),
    "loss_stashed_on_modules": (nets.Stashing, VARIED, 0.25),
}


SELDOM = ("llama", "gpt_with_dropout", "branch")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [slow(case) if case in SELDOM else case for case in SAME])
def test_the_same_bits_switch_it_on(case: str, tmp_path: Path) -> None:
    make, batches, room_mib = SAME[case]
    strategy = check_auto(tmp_path, make, batches, room_mib=room_mib, accumulate_grad_batches=4)
    order, reason = order_of(strategy)
    assert order == "layer-major", reason
    assert reason.endswith(BIT_FOR_BIT)


ROUNDING = {
    "tied": (odd.Tied, 0.25, "parameters that several units use: network.embed.weight by"),
    "tied_llama": (nets.zoo_model("llama", tied=True), 1.0, "parameters that several units use"),
    "called_twice": (odd.CalledTwice, 0.25, "units that run twice in a step: network.blocks.0."),
    "batch_norm": (odd.Counting, 0.25, "units that change a buffer: network.blocks."),
}


@pytest.mark.parametrize(
    "case", [slow(case) if case == "tied_llama" else case for case in ROUNDING]
)
def test_rounding_is_accepted_and_named(case: str, tmp_path: Path) -> None:
    make, room_mib, words = ROUNDING[case]
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 2}
    expected = fit(tmp_path, make, VARIED, None, **settings)
    found, strategy = fit_auto(tmp_path, make, VARIED, room_mib=room_mib, **settings)
    order, reason = order_of(strategy)
    assert order == "layer-major", reason
    assert "are the same but for rounding" in reason
    assert words in reason
    for name in ("losses", "events", "buffers", "rng"):
        assert_same(expected[name], found[name], name)
    for name, moment in expected["moments"].items():
        gap = (moment - found["moments"][name]).double().norm()
        assert gap <= 1e-6 * moment.double().norm(), name


USUAL: dict[str, tuple[Callable[[], nn.Module], list[Batch], str]] = {
    "global_toggled_around_the_pass": (odd.GloballyFlagged, VARIED, "the loss of batch 0 differs"),
    "loss_appended_to_a_list": (odd.Collecting, VARIED, "the loss of batch 0 differs by"),
    "dict_changed_in_place": (odd.Switching, VARIED, "the gradient of network."),
    "steps_that_must_be_alone": (odd.Alone, VARIED, "it fails: RuntimeError: two steps at once"),
    "iterator": (odd.Drawing, VARIED, "network.noise is an iterator, which a step may draw from"),
    "large_tensor": (odd.Remembering, VARIED, "network.seen, which is too large to be kept twice"),
    "unit_that_rests": (odd.Resting, EVEN, "network.blocks.1 does not run in all of them"),
    "dropout_by_the_data": (odd.DroppingSometimes, EVEN, "draw different numbers of random"),
}


@pytest.mark.parametrize("case", USUAL)
def test_what_differs_keeps_the_usual_order(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mt_lightning.layer_major.loop")
    make, batches, words = USUAL[case]
    strategy = check_auto(tmp_path, make, batches, accumulate_grad_batches=4)
    order, reason = order_of(strategy)
    assert order == "usual"
    assert words in reason
    assert f"batches run in the usual order from now on: {reason}" in caplog.text


class Handle:
    """Cannot be looked at, as some objects of other libraries."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("closed")


class Holding(nets.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.handle = Handle()


class Pair:
    """A batch of a kind that Lightning knows nothing of."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.num_uses = 0


class TakesPairs(Subject):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.num_uses += 1
        assert batch.num_uses <= 2
        return super().training_step(batch.batch, batch_idx)


def test_what_cannot_be_looked_at_keeps_the_usual_order(tmp_path: Path) -> None:
    order, reason = order_of(check_auto(tmp_path, Holding, VARIED, accumulate_grad_batches=4))
    assert order == "usual"
    assert reason == "what a step changes cannot be taken back: RuntimeError: closed"


def test_batches_of_any_kind_can_run_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "subject": TakesPairs}
    found, strategy = fit_auto(tmp_path, nets.Tiny, lambda: [Pair(b) for b in VARIED], **settings)  # type: ignore[arg-type]
    pairs: Any = [Pair(batch) for batch in VARIED]
    assert_same(fit(tmp_path, nets.Tiny, pairs, None, **settings), found)
    assert order_of(strategy)[0] == "layer-major", order_of(strategy)


class FactorOfTheBatch(Subject):
    """A hook sets for each batch what its step reads behind the network."""

    factor = 1.0

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.factor = 1.0 + batch_idx / 8

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss * self.factor


def test_what_hooks_set_for_each_batch_keeps_the_usual_order(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"subject": FactorOfTheBatch, "accumulate_grad_batches": 4}
    order, reason = order_of(check_auto(tmp_path, nets.Tiny, VARIED, **settings))
    assert order == "usual"
    assert "the loss of batch 0 differs by" in reason


class Skipping(Subject):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 5, 7) else loss


class Popping(Subject):
    """A step takes its batch apart."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        ids = batch.pop("input_ids")
        batch["labels"].clamp_(max=40)
        return super().training_step({"input_ids": ids, "labels": batch["labels"]}, batch_idx)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.1},
        slow({"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        {"precision": "bf16-mixed"},
        {"val_check_interval": 2, "val_batches": nets.tokens(2, [7], seed=5)},
        {"subject": Skipping},
        {"paging": {"nonfinite": "skip"}},
        slow({"paging": {"durability": "checkpoint"}}),
        slow({"paging": {"optimizer_compression": "lossless"}}),
    ],
    ids=lambda settings: str(next(iter(settings.values())))[:40],
)
def test_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    strategy = check_auto(tmp_path, nets.Tiny, VARIED, accumulate_grad_batches=4, **settings)
    assert order_of(strategy)[0] == "layer-major", order_of(strategy)


def test_a_step_may_take_its_batch_apart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "subject": Popping}
    expected = fit(tmp_path, nets.Tiny, nets.tokens(13, [9]), None, **settings)
    found, strategy = fit_auto(tmp_path, nets.Tiny, lambda: nets.tokens(13, [9]), **settings)
    assert_same(expected, found)
    assert order_of(strategy)[0] == "layer-major", order_of(strategy)


def test_accumulation_that_changes(tmp_path: Path) -> None:
    found = []
    for auto in (False, True):
        scheduler = GradientAccumulationScheduler({0: 1, 1: 4, 3: 2})
        settings: dict[str, Any] = {"callbacks": (scheduler,), "max_epochs": 4}
        if auto:
            outcome, strategy = fit_auto(tmp_path, nets.Tiny, VARIED, **settings)
            assert order_of(strategy)[0] == "layer-major", order_of(strategy)
        else:
            outcome = fit(tmp_path, nets.Tiny, VARIED, None, **settings)
        found.append(outcome)
    assert_same(*found)


class OneUlpOff(Comparison):
    """One element of one sum is the next number."""

    name = ""
    num_changed = 0

    def on_complete(self, page: Any) -> None:
        names = [spec.name for spec in page.layout.params]
        if self.name in names:
            held = self._gradients.held(page)
            assert held is not None
            grad = held.ram[names.index(self.name)]
            assert grad is not None
            value = grad[3, 5].clone()
            grad[3, 5] = torch.nextafter(value, torch.tensor(2.0))
            assert grad[3, 5] != value
            type(self).num_changed += 1
        super().on_complete(page)


@pytest.mark.parametrize(
    ("make", "name", "clip"),
    [
        (nets.Tiny, "network.blocks.1.up.weight", None),
        (odd.Tied, "network.blocks.2.up.weight", 0.1),
        slow(nets.Tiny, "network.blocks.1.up.weight", 0.1),
        slow(odd.Tied, "network.blocks.2.up.weight", None),
    ],
)
def test_one_bit_is_noticed(
    make: Any, name: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneUlpOff, "num_changed", 0)
    monkeypatch.setattr(OneUlpOff, "name", name)
    monkeypatch.setattr(first_window, "Comparison", OneUlpOff)
    settings = {"accumulate_grad_batches": 4, "gradient_clip_val": clip}
    strategy = check_auto(tmp_path, make, VARIED, **settings)
    assert OneUlpOff.num_changed == 1
    order, reason = order_of(strategy)
    assert order == "usual"
    assert f"the gradient of {name} differs by up to" in reason


class TooFarOff(Comparison):
    def add(self, page: Any, param: int, grad: torch.Tensor) -> None:
        in_block = "blocks" in page.layout.params[param].name
        super().add(page, param, grad * (1 + 1e-4 * in_block))


def test_rounding_explains_only_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_window, "Comparison", TooFarOff)
    strategy = check_auto(tmp_path, odd.Counting, VARIED, accumulate_grad_batches=4)
    order, reason = order_of(strategy)
    assert order == "usual"
    assert "and rounding (units that change a buffer) explains" in reason


def test_a_window_that_proves_nothing_is_followed_by_another(tmp_path: Path) -> None:
    # The first gradients behind a head of zeros are zero, whatever the order.
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    checks = Checks()
    found, strategy = fit_auto(tmp_path, odd.ZeroHead, VARIED, callbacks=(checks,), **settings)
    assert_same(fit(tmp_path, odd.ZeroHead, VARIED, None, **settings), found)
    assert order_of(strategy)[0] == "layer-major", order_of(strategy)
    assert checks.orders[:12] == ["undecided"] * 8 + ["layer-major"] * 4


class Checks(pl.Callback):
    """Notes the order in which each batch runs."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.orders.append(trainer.strategy.engine.plan.order)


def test_nothing_is_checked_where_nothing_is_saved(tmp_path: Path) -> None:
    checks = Checks()
    strategy = MegaTrainStrategy(max_ram_gb=1.0)
    settings = {"callbacks": (checks,), "accumulate_grad_batches": 4}
    fit(tmp_path, nets.Tiny, VARIED, strategy, **settings)
    assert set(checks.orders) == {"usual"}
    assert order_of(strategy)[1] == "no weight is read more than once per step"


class OwnBackward(Subject):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Manual(Subject):
    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("subject", [OwnBackward, Manual])
def test_what_true_refuses_takes_the_usual_order(
    subject: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"subject": subject}
    if subject is OwnBackward:
        settings["accumulate_grad_batches"] = 4
    room = tight_gb(tmp_path, nets.Tiny, VARIED, accumulate_grad_batches=4)
    strategy = MegaTrainStrategy(max_ram_gb=room)
    found = fit(tmp_path, nets.Tiny, VARIED, strategy, **settings)
    assert_same(fit(tmp_path, nets.Tiny, VARIED, None, **settings), found)
    assert order_of(strategy) == ("usual", "")
    assert "layer_major" not in caplog.text


class Greedy(pl.Callback):
    """Asks for more memory than there is, before the second batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            run = trainer.strategy.engine.live.run
            assert run.budget.by_purpose["first window"]
            with pytest.raises(BudgetError, match="a test"):
                run.pool.reserve(run.budget.limit_bytes, "graphs", "a test")
            assert not run.budget.by_purpose["first window"]


def test_what_is_kept_for_a_comparison_makes_room_for_training(tmp_path: Path) -> None:
    expected = fit(tmp_path, nets.Tiny, VARIED, None, accumulate_grad_batches=4)
    settings = {"accumulate_grad_batches": 4, "callbacks": (Greedy(),)}
    found, strategy = fit_auto(tmp_path, nets.Tiny, VARIED, **settings)
    assert_same(expected, found)
    assert "training needs the memory" in order_of(strategy)[1]
