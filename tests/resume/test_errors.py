"""Wherever an error ends a run: no finished step is lost, and the run goes on as if it had not."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from mt_lightning import MegaTrainStrategy
from mt_lightning.tiers.commit import CommitLog

from .run import QUIET, Counting, Tokens, Told, assert_goes_on_as, paged

ARMED_AFTER = 6
"""Batches that have been trained on when the place fails that comes next."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "eager": {"max_steps": 13},
    "deferred": {"max_steps": 13, "gradient_clip_val": 0.5},
    "layer-major": {"max_steps": 5, "accumulate_grad_batches": 3},
}


class BrokenError(Exception):
    """What the user's code raises."""


class Bomb:
    """Raises once, when a run has come far enough."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.finished: int | None = None
        """Finished steps when it raised."""

    def check(self, trainer: Trainer) -> None:
        trained = len(trainer.lightning_module.batches)
        if self.finished is None and trained >= ARMED_AFTER and not trainer.sanity_checking:
            self.finished = trainer.strategy.engine.num_steps
            raise self.error

    def around(self, holder: Any, name: str, trainer: Trainer, when: str) -> None:
        """Raise before or behind what a method does."""
        inner = getattr(holder, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                self.check(trainer)
            result = inner(*args, **kwargs)
            if when == "behind":
                self.check(trainer)
            return result

        holder.__dict__[name] = run


class Schedules(Told):
    """Two schedules of the same rate, each of which goes on from what the other has set."""

    def configure_optimizers(self) -> Any:
        [optimizer], [each_step] = super().configure_optimizers()
        often = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.99)
        seldom = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9)
        return [optimizer], [
            each_step,
            {"scheduler": often, "interval": "step", "frequency": 2},
            {"scheduler": seldom, "interval": "epoch"},
        ]


class Tensors(Tokens):
    """Tokens whose reading may fail."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Quiet(DummyLogger):
    """A logger that writes nothing."""

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass


def train(
    strategy: Any, place: Place | None = None, error: type[BaseException] = BrokenError, **run: Any
) -> tuple[Told, Bomb]:
    """Train until the end or until `place` fails; everything is new each time."""
    seed_everything(run.pop("seed", 0))
    module, early, late = Schedules(None), Callback(), Callback()
    module.counting = Counting()
    trainer = Trainer(
        strategy=strategy,
        max_epochs=-1,
        val_check_interval=4,
        log_every_n_steps=1,
        callbacks=[early, module.counting, late],
        **{**QUIET, "logger": Quiet()},
        **run,
    )
    data, bomb = Tensors(21, False), Bomb(error)
    if place is not None:
        holders = {
            "module": module,
            "layer": module.layers[1],
            "early callback": early,
            "late callback": late,
            "logger": trainer.logger,
            "loader": data,
            "optimizer loop": trainer.fit_loop.epoch_loop.automatic_optimization,
        }
        bomb.around(holders[place.holder], place.name, trainer, place.when)
    loader = DataLoader(data, batch_size=2, shuffle=True)
    validation = DataLoader(Tokens(4, False), batch_size=2)
    try:
        trainer.fit(module, loader, validation)
    except (BrokenError, KeyboardInterrupt, SystemExit):
        assert bomb.finished is not None
    return module, bomb


@cache
def straight(schedule: str) -> Told:
    """Return a run in which nothing fails, as plain Lightning has it."""
    strategy = "auto"
    if schedule == "layer-major":
        # Units that count their calls in a buffer add up gradients in another order.
        strategy = MegaTrainStrategy(max_ram_gb=0.1, layer_major=True)
    return train(strategy, **SCHEDULES[schedule])[0]


@dataclass(frozen=True)
class Place:
    """Where user code fails.

    Attributes:
        holder: Whose code it is.
        name: The method.
        when: Whether it fails "before" or "behind" its work.
        misses: Whether the callback that counts batches is not called for this one.
        behind_step: Whether the step of the batch is finished, but not the batch.
    """

    holder: str
    name: str
    when: str = "before"
    misses: bool = False
    behind_step: bool = False

    def __str__(self) -> str:
        return f"{self.when} {self.holder} {self.name}"


PLACES = [
    # Before a step is finished: it is undone.
    Place("loader", "__getitems__"),
    Place("module", "on_train_batch_start"),
    Place("module", "training_step"),
    Place("layer", "forward"),
    Place("module", "on_before_zero_grad"),
    Place("module", "on_before_backward"),
    Place("module", "on_after_backward"),
    Place("module", "on_before_optimizer_step"),
    Place("module", "optimizer_step"),
    # Behind it, before the end of its batch.
    Place("module", "optimizer_step", "behind", misses=True, behind_step=True),
    Place("module", "lr_scheduler_step", misses=True, behind_step=True),
    Place("module", "lr_scheduler_step", "behind", misses=True, behind_step=True),
    Place("early callback", "on_train_batch_end", misses=True, behind_step=True),
    Place("late callback", "on_train_batch_end", behind_step=True),
    Place("module", "on_train_batch_end", behind_step=True),
    Place("logger", "log_metrics", behind_step=True),
    # Behind the batch.
    Place("late callback", "state_dict"),
    Place("module", "on_validation_model_zero_grad"),
    Place("module", "on_validation_start"),
    Place("module", "validation_step"),
    Place("module", "on_validation_epoch_end", "behind"),
    Place("late callback", "on_validation_end"),
    Place("late callback", "on_train_epoch_end"),
    Place("module", "on_train_epoch_end", "behind"),
    Place("module", "on_train_epoch_start"),
    Place("late callback", "on_train_end"),
]
RUNS = [
    ("step", "eager"),
    ("step", "deferred"),
    ("checkpoint", "deferred"),
    ("step", "layer-major"),
    ("checkpoint", "layer-major"),
]
ERRORS = [BrokenError, KeyboardInterrupt]


def cases() -> Iterator[Any]:
    """Yield all of them; a part in which everything occurs runs always, the rest with --slow."""
    for i, place in enumerate(PLACES):
        for j, (durability, schedule) in enumerate(RUNS):
            if schedule == "layer-major" and place.name == "on_validation_model_zero_grad":
                continue  # no validation is due behind a step
            for k, error in enumerate(ERRORS):
                often = (i + j) % 3 == 0 if place.behind_step else (i + j) % 5 == 0
                always = often and (i + j) // 2 % 2 == k
                yield pytest.param(
                    place,
                    durability,
                    schedule,
                    error,
                    id=f"{place}, {durability}, {schedule}, {error.__name__}",
                    marks=[] if always else [pytest.mark.slow],
                )


@pytest.fixture(autouse=True)
def _keep_the_signal_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    # Lightning leaves it ignored after a Ctrl-C.
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("place", "durability", "schedule", "error"), list(cases()))
def test_no_finished_step_is_lost_and_the_run_goes_on(
    tmp_path: Path,
    place: Place,
    durability: str,
    schedule: str,
    error: type[BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:
    paging = {"durability": durability, "layer_major": schedule == "layer-major"}
    strategy = paged(tmp_path, **paging)
    with caplog.at_level(logging.WARNING):
        _, bomb = train(strategy, place, error, **SCHEDULES[schedule])
    assert bomb.finished, "the place was never reached"
    record = CommitLog([tmp_path]).latest()
    assert record is not None
    assert record.step == bomb.finished
    told = [m for m in caplog.messages if "before its batch had ended" in m]
    assert len(told) == place.behind_step
    strategy._close()

    expected = straight(schedule)
    again = paged(tmp_path, on_existing="resume", **paging)
    actual, _ = train(again, seed=99, **SCHEDULES[schedule])
    again._close()
    actual.counting.count += place.misses
    skipped = assert_goes_on_as(expected, actual)
    assert [each[0] for each in expected.batches[skipped - 1 : skipped]] == [bomb.finished - 1]
    assert [each[0] for each in expected.batches[skipped : skipped + 1]] in ([bomb.finished], [])
