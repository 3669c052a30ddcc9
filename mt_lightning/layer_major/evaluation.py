"""Ties steps that run together to Lightning's loops of validation, test and prediction.

[Note: what Lightning sees]
Each batch runs the loop's own code in a greenlet: hooks, step, logs. It stops where its step enters
the first unit; the next batch is drawn and started. When there is no room for another one, or no
other one, all of them run, one unit at a time. What follows a step (logs that count, the hooks of
its end, its result) comes in the order of batches.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from greenlet import GreenletExit

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.window.forward import ForwardWindow, Step
from mt_lightning.engine.window.micro import current
from mt_lightning.engine.window.shown import Shown
from mt_lightning.engine.window.step_state import StepState
from mt_lightning.layer_major.eval_view import EvaluationView
from mt_lightning.layer_major.in_turn import LogsInTurn, MetricsInTurn, metrics_of
from mt_lightning.layer_major.room import Room, weights_fit
from mt_lightning.layer_major.sweeps import Sweeps

log = logging.getLogger(__name__)

_MOST_STEPS = 32
"""More of them save little: what is left to read is 1/32 of it."""
_OPAQUE = ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")


class Evaluation:
    """Follows the loops of one trainer that only run forward.

    Args:
        trainer: The trainer.
        engine: The attached engine.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._loops: list[Any] = [
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ]
        self._known: dict[int, Shown] = {}
        """What steps of each loop have shown, by position."""
        self.told: set[str] = set()

    def attach(self) -> None:
        """Follow the loops from here on."""
        self.detach()
        for place, loop in enumerate(self._loops):
            loop.__dict__["run"] = partial(self._run, place, loop, loop.run)

    def detach(self) -> None:
        """Leave the loops alone."""
        for loop in self._loops:
            loop.__dict__.pop("run", None)

    def _run(self, place: int, loop: Any, run: Callable[[], Any]) -> Any:
        on_host = self._engine.machine.link.device.type == "cpu"
        if not on_host or not self._engine.attached or weights_fit(self._engine):
            return run()
        known = self._known.setdefault(place, Shown())
        following = _Following(self._trainer, self._engine, loop, known, self.told)
        try:
            return run()
        except Exception:
            # A loader that fails does so behind the batches that it has given.
            following.flush()
            raise
        finally:
            following.end()


class _Following:
    """One run of a loop."""

    def __init__(
        self,
        trainer: pl.Trainer,
        engine: Engine,
        loop: Any,
        known: Shown,
        told: set[str],
    ) -> None:
        self._trainer, self._engine, self._loop, self._told = trainer, engine, loop, told
        self._option = engine.options.layer_major
        self._learned = known
        live, root = engine.live, engine.root
        units = [list(unit.module.modules()) for unit in live.run.build.units]
        self._state = StepState(root, units, metrics_of(root))
        self._window = ForwardWindow(live, self._state, self._learned, _OPAQUE)
        self._room = Room(engine)
        self._window_before, live.window = live.window, self._window
        predicts = loop is trainer.predict_loop
        self._step_name = "predict_step" if predicts else f"{_stage(loop)}_step"
        self._body: Callable[..., None]
        self._body = loop._predict_step if predicts else loop._evaluation_step
        self._sweeps = Sweeps(engine, self._step_name, told)
        self._window.watch(self._sweeps.visit)
        self._patched: dict[str, Callable[..., Any]]
        self._patched = {"_predict_step" if predicts else "_evaluation_step": self._take}
        for name in ("_store_dataloader_outputs", "on_run_end"):
            if hasattr(loop, name):
                self._patched[name] = partial(self._flush_and, getattr(loop, name))
        loop.__dict__.update(self._patched)
        self._step = getattr(trainer.strategy, self._step_name)
        vars(trainer.strategy)[self._step_name] = self._run_step
        self._metrics = MetricsInTurn(self._window, root, known.updates)
        self._logs = LogsInTurn(self._window, loop._results) if not predicts else None
        self._dataloader_idx: int | None = None

    def end(self) -> None:
        """Leave everything alone; steps that have not ended never will."""
        self._window.abandon()
        self._engine.live.window = self._window_before
        for name in self._patched:
            self._loop.__dict__.pop(name, None)
        vars(self._trainer.strategy).pop(self._step_name, None)
        self._metrics.detach()
        if self._logs is not None:
            self._logs.detach()

    # -- batches ----------------------------------------------------------------------------------

    def _take(self, batch: Any, batch_idx: int, dataloader_idx: int, iterator: Any) -> None:
        """Start a batch; takes the place of the loop's own step."""
        self._sweeps.begin()
        if iterator is not None or self._option is False or not self._apart():
            self.flush()
            self._body(batch, batch_idx, dataloader_idx, iterator)
            return
        if dataloader_idx != self._dataloader_idx:
            self.flush()
            self._dataloader_idx = dataloader_idx
        window, before = self._window, self._window.steps
        alone = not self._learned.most_bytes
        view = EvaluationView(self._trainer, self._loop, _view(before[-1]) if before else None)
        run = partial(self._run_batch, view, (batch, batch_idx, dataloader_idx, None), alone)
        step = window.start(run, view, count=not before)
        ends = alone or step.failure is not None or len(window.steps) >= _MOST_STEPS
        if not ends and not step.ended:
            ends = not self._make_room(step)
        if ends or self._loop.batch_progress.is_last_batch:
            self.flush()

    def _run_batch(self, view: EvaluationView, batch: tuple[Any, ...], alone: bool) -> None:
        step = current()
        assert isinstance(step, Step)
        try:
            self._body(*batch)
        except Exception as error:
            self._window.await_turn(step, error)
            self._flush_logs(step)
        except GreenletExit:
            raise
        except BaseException:
            # A signal: where it comes behind a batch, that one has ended.
            view.stays = self._window.is_turn(step)
            raise
        self._metrics.ended(step, alone=alone)
        view.stays = True

    def _flush_logs(self, step: Step) -> None:
        if self._logs is not None:
            self._logs.flush(step)

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._step(*args, **kwargs)
        step = current()
        if isinstance(step, Step):
            self._window.await_turn(step)
            self._flush_logs(step)
        return output

    def _make_room(self, step: Step) -> bool:
        """Reserve what a step will hold; run those before it where it does not fit beside them.

        Returns:
            False where it does not fit at all, so that nothing may run beside it.
        """
        num_bytes = self._learned.num_bytes(step.shapes)
        num_before = len(self._window.steps) - 1
        step.room = self._room.reserve(num_bytes, spare=num_before < 2)
        if step.room is None:
            if num_before:
                self._run_window(num_before)
                step.room = self._room.reserve(num_bytes, spare=True)
            if num_before < 2 and not self._window.num_groups_of_many:
                self._tell_room(num_bytes)
        return step.room is not None

    def _apart(self) -> bool:
        """Return whether steps may run beside each other."""
        if self._option != "auto" or not self._learned.carried:
            return True
        names = ", ".join(sorted(self._learned.carried))
        self._tell(
            "carried",
            f"{self._step_name} changes {names} between units, which the next batch may depend "
            f"on: batches run one after the other. layer_major=True runs them together.",
            logging.INFO,
        )
        return False

    # -- groups -----------------------------------------------------------------------------------

    def _flush_and(self, call: Callable[[], Any]) -> Any:
        # A step that raises it ends the loop, as it would in the loop's own try.
        with contextlib.suppress(StopIteration):
            self.flush()
        return call()

    def flush(self) -> None:
        """Run all batches that were started to their end."""
        if self._window.steps:
            self._run_window(None)

    def _run_window(self, num_steps: int | None) -> None:
        self._window.run(num_steps)
        self._learned.carried |= self._state.carried
        self._tell_order()

    def _tell_order(self) -> None:
        window = self._window
        if window.num_other_draws:
            self._tell(
                "draws",
                f"{self._step_name} draws different numbers of random numbers in batches that run "
                "together, so that they are others than in the usual order (they are as random). "
                "layer_major=False gives the same ones.",
            )
        if window.num_late or self._metrics.num_other_orders:
            self._tell(
                "late",
                f"{self._step_name} enters different numbers of units in batches that run "
                "together: results and logs are in the order of batches, but what it appends or "
                "counts itself is in the order in which steps end. layer_major=False keeps it.",
            )
        if window.uncounted_bytes:
            self._tell(
                "bytes",
                f"batches that run together hold more than expected: "
                f"{window.uncounted_bytes / 2**20:.1f} MiB each lie above max_ram_gb. Set "
                "layer_major=False if memory runs short.",
            )

    def _tell_room(self, num_bytes: int) -> None:
        self._tell(
            "room",
            f"{self._step_name} holds {num_bytes / 2**20:.1f} MiB per batch between units, and "
            f"max_ram_gb leaves {max(0, self._room.num_bytes(spare=False)) / 2**20:.1f} MiB beside "
            "one batch: batches run one after the other. Raise max_ram_gb, or use smaller batches.",
            logging.WARNING if self._option is True else logging.INFO,
        )

    def _tell(self, key: str, text: str, level: int = logging.WARNING) -> None:
        if (self._step_name + key) not in self._told:
            self._told.add(self._step_name + key)
            log.log(level, "%s", text)


def _view(step: Step) -> EvaluationView:
    assert isinstance(step.view, EvaluationView)
    return step.view


def _stage(loop: Any) -> str:
    return "test" if loop._stage.value == "test" else "validation"
