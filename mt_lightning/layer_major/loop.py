"""Ties windows to Lightning's loop: each batch starts its step, the last one runs them all.

[Note: what Lightning sees]
A batch that does not end a window starts its `training_step`, which stops before the first unit.
All steps of the window run when the optimizer is due, in the closure that it calls, and in the
order of their batches as far as their losses, logs and metrics go. What cannot be had is said in
docs/layer_major.md: the loss of a batch in its own `on_train_batch_end`. With "auto", whoever looks
at it there makes the steps run that were started.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.optimization.closure import AbstractClosure

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.window.draws import count_draws, take_generators
from mt_lightning.engine.window.grouping import best_group
from mt_lightning.engine.window.micro import Micro
from mt_lightning.engine.window.window import Window
from mt_lightning.layer_major.first_window import OTHER_DRAWS, FirstWindow
from mt_lightning.layer_major.groups import rooms_of, too_narrow
from mt_lightning.layer_major.outputs import NotYet, OnDemand
from mt_lightning.layer_major.verdict import Verdict, model_key
from mt_lightning.layer_major.view import BatchView

log = logging.getLogger(__name__)


_MOST_CHECKS = 3
"""Windows that are run again at most, while some gradients are all zero and prove nothing."""


class LayerMajor:
    """Follows one fit.

    Args:
        trainer: The trainer.
        engine: The attached engine, whose plan says what is open to choose.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._window: Window | None = None
        self._begun = False
        """Whether the batches of this window are started, not run."""
        self._seen = False
        """Whether a window has run in the usual order, so that it is known what steps do."""
        self._check: FirstWindow | None = None
        self._num_checks = 0
        self._silent: set[str] = set()
        self._verdict: Verdict | None = None
        self._told_draws = self._told_room = False

    @property
    def _insists(self) -> bool:
        return self._engine.options.layer_major is True

    @property
    def _order(self) -> str:
        assert self._engine.plan is not None
        return self._engine.plan.order

    def attach(self) -> None:
        """Follow the loops; called when training starts."""
        if self._order == "usual" or not self._trainer.lightning_module.automatic_optimization:
            return
        loop = self._trainer.fit_loop.epoch_loop
        self._window = self._engine.live.window = Window(self._engine.live, self._engine.root)
        run, on_advance_end = loop.run, loop.on_advance_end

        def run_epoch(fetcher: Any) -> None:
            try:
                run(fetcher)
                # Training was stopped in mid-window; what was started counts for the logs.
                self._catch_up()
            except BaseException:
                self._abandon()
                raise

        def end_batch(fetcher: Any) -> None:
            if loop._should_check_val_fx(fetcher):
                self._catch_up()
            on_advance_end(fetcher)

        loop.__dict__.update(run=run_epoch, on_advance_end=end_batch)
        optimization = loop.automatic_optimization
        optimization.__dict__["run"] = self._run

    def detach(self) -> None:
        """Leave the loops alone."""
        self._abandon()
        self._end_check()
        self._window = None
        loop = self._trainer.fit_loop.epoch_loop
        for name in ("run", "on_advance_end"):
            loop.__dict__.pop(name, None)
        loop.automatic_optimization.__dict__.pop("run", None)

    def state(self) -> dict[str, Any] | None:
        """Return what a run that goes on has to know, None where there is nothing."""
        known = self._window is not None and self._seen
        state = self._window.learned.state() if self._window is not None and known else {}
        if self._verdict is not None and self._verdict.model is not None:
            state["verdict"] = self._verdict.state()
        return state or None

    def give(self, state: dict[str, Any] | None) -> None:
        """Go on where another run has ended; called before the first batch."""
        if self._window is None or state is None:
            return
        if self._order == "undecided":
            kept = state.get("verdict")
            if kept is None:
                return
            verdict = Verdict(**kept)
            if verdict.model != model_key(self._trainer.lightning_module, self._engine):
                log.info("layer_major='auto': the model is not what it was; it is checked anew.")
                return
            self._decide(verdict)
        if "order" in state:
            self._window.learned.give(state)
            self._seen = True

    # -- batches ----------------------------------------------------------------------------------

    def _run(
        self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]
    ) -> dict[str, Any]:
        """Run a batch; takes the place of Lightning's automatic optimization."""
        loop = self._trainer.fit_loop.epoch_loop
        optimization, ends = loop.automatic_optimization, not loop._should_accumulate()
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._begin_window(alone=ends)
        if not self._begun:
            outputs = self._run_usual(optimizer, batch_idx, kwargs)
            self._seen |= ends and self._trainer.accumulate_grad_batches > 1
            self._conclude(ends=ends)
            return outputs
        assert self._window is not None
        zero_grad = optimization._make_zero_grad_fn(batch_idx, optimizer)
        micro = self._window.start(partial(self._step, kwargs), BatchView(self._trainer))
        if zero_grad is not None:
            with torch.enable_grad():
                zero_grad()
        self._make_room()
        if not ends and self._insists:
            return NotYet()
        if not ends:
            if micro.shapes is not None and self._window.learned.draws(micro.shapes) is None:
                # Where the next step finds the generator is known when this one has ended.
                self.run_window()
            return OnDemand(partial(self._outputs, micro))
        closure = _WindowClosure(self, micro)
        optimization._optimizer_step(batch_idx, closure)
        self._begun = False
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def _begin_window(self, *, alone: bool) -> None:
        """Decide how the batches of a window run; `alone` says that there is only one."""
        self._end_check()
        if self._told_draws and not self._insists and self._verdict is not None:
            self._decide(Verdict(layer_major=False, reason=OTHER_DRAWS, model=self._verdict.model))
            self._told_draws = False
        self._begun = (
            self._order == "layer-major" and self._seen and not alone and self._holds_two()
        )
        if self._order == "undecided" and not alone and self._window is not None:
            group = partial(self._group, None)
            self._check = FirstWindow(self._trainer, self._engine, self._window, self._step, group)

    def _outputs(self, micro: Micro) -> dict[str, Any]:
        """Run what was started, and return the outputs of one of its batches."""
        if self._window is not None and micro in self._window.micros:
            self.run_window()
        result = micro.result
        return {} if result is None or result.loss is None else result.asdict()

    def _run_usual(
        self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]
    ) -> dict[str, Any]:
        optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization
        usual, check = type(optimization), self._check
        knows = self._seen or self._trainer.accumulate_grad_batches == 1
        if check is None and (knows or self._window is None):
            return usual.run(optimization, optimizer, batch_idx, kwargs)
        assert self._window is not None
        learned = self._window.learned

        def watched(kwargs: OrderedDict[str, Any]) -> ClosureResult:
            if check is not None:
                check.before_step(kwargs)
            learned.begin()
            device = self._engine.machine.link.device
            before = take_generators(device)
            result = usual._training_step(optimization, kwargs)
            learned.end(count_draws(before, take_generators(device)))
            if check is not None:
                check.after_step(result)
            return result

        def make_closure(*args: Any) -> AbstractClosure[ClosureResult]:
            closure = usual._make_closure(optimization, *args)
            ends = not self._trainer.fit_loop.epoch_loop._should_accumulate()
            return closure if check is None else _CheckedClosure(closure, check, ends=ends)

        optimization.__dict__.update(_training_step=watched, _make_closure=make_closure)
        try:
            return usual.run(optimization, optimizer, batch_idx, kwargs)
        finally:
            del optimization.__dict__["_training_step"]
            del optimization.__dict__["_make_closure"]

    def _conclude(self, *, ends: bool) -> None:
        """Act on what the first window has shown; `ends` says that its step has been taken."""
        check = self._check
        if check is None or not ends:
            return
        check.end_step()
        verdict, silent = check.verdict, check.silent
        if verdict is not None and verdict.layer_major:
            self._silent = self._silent & silent if self._num_checks else silent
            self._num_checks += 1
            if self._silent and self._num_checks < _MOST_CHECKS:
                verdict = None
        if verdict is not None:
            self._decide(verdict)

    def _decide(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._end_check()
        self._engine.decide_order(verdict.reason, layer_major=verdict.layer_major)
        log.info(
            "layer_major='auto': batches run %s from now on: %s",
            "unit by unit" if verdict.layer_major else "in the usual order",
            verdict.reason,
        )
        if not verdict.layer_major:
            optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization
            optimization.__dict__.pop("run", None)
            self._window = self._engine.live.window = None

    def _end_check(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.end()

    def _step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        # Not through Lightning's hook: its profiler cannot tell steps that overlap apart.
        strategy, trainer = self._trainer.strategy, self._trainer
        with torch.enable_grad():
            output = strategy.training_step(*kwargs.values())
            strategy.post_training_step()
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        return optimization.output_result_cls.from_training_step_output(
            output, trainer.accumulate_grad_batches
        )

    # -- windows ----------------------------------------------------------------------------------

    def run_window(self, num_micros: int | None = None) -> None:
        """Run steps that were started, and backward through them."""
        window, trainer = self._window, self._trainer
        assert window is not None
        losses: list[torch.Tensor] = []

        def on_loss(micro: Micro) -> torch.Tensor | None:
            loss, micro.result.closure_loss = micro.result.closure_loss, None
            if loss is None:
                Closure.warning_cache.warn(
                    "`training_step` returned `None`. If this was on purpose, ignore this "
                    "warning..."
                )
                return None
            losses.append(loss.detach())
            trainer.strategy.pre_backward(loss)
            return trainer.precision_plugin.pre_backward(loss, trainer.lightning_module)

        window.run(num_micros, on_loss)
        for loss in losses:
            trainer.precision_plugin.post_backward(loss, trainer.lightning_module)
            trainer.strategy.post_backward(loss)
        if window.num_other_draws and not self._told_draws:
            self._told_draws = True
            log.warning(
                "layer_major=%r: steps draw different numbers of random numbers, so that dropout "
                "masks are others than in the usual order (they are as random).%s",
                self._engine.options.layer_major,
                "" if self._insists else " From the next window on, batches run in that order.",
            )

    def _make_room(self) -> None:
        """Run what was started before this batch where that moves fewer bytes than one group."""
        window = self._window
        assert window is not None
        num_started = len(window.micros)
        if num_started > 1 and num_started > self._group(window.num_input_bytes() // num_started):
            self.run_window(num_started - 1)

    def _holds_two(self) -> bool:
        """Return whether groups of batches move fewer bytes than the usual order."""
        assert self._window is not None
        input_bytes = self._window.learned.most_bytes
        if self._group(input_bytes) > 1:
            return True
        if not self._told_room:
            self._told_room = True
            option = self._engine.options.layer_major
            log.warning("layer_major=%r: %s", option, too_narrow(self._engine, input_bytes))
        return False

    def _group(self, input_bytes: int | None, beside_bytes: int = 0) -> int:
        """Return how many batches a group is best made of, each with that many bytes of inputs.

        Args:
            input_bytes: None for the most that a batch has had.
            beside_bytes: What else takes room in RAM.
        """
        assert self._window is not None
        near_bytes, away_bytes, sweep_bytes = rooms_of(self._engine, beside_bytes)
        learned = self._window.learned
        return best_group(
            self._trainer.accumulate_grad_batches,
            input_bytes=learned.most_bytes if input_bytes is None else input_bytes,
            widest_bytes=learned.widest_bytes,
            near_bytes=near_bytes,
            away_bytes=away_bytes,
            sweep_bytes=sweep_bytes,
        )

    def _catch_up(self) -> None:
        """Run what was started, as far as it goes: somebody is about to look."""
        if self._window is None or not self._window.micros:
            return
        self.run_window()
        self._trainer._logger_connector.on_batch_end()

    def _abandon(self) -> None:
        if self._window is not None:
            self._window.abandon()


class _WindowClosure(AbstractClosure[ClosureResult]):
    """Runs a whole window; the result is that of its last step."""

    def __init__(self, order: LayerMajor, last: Micro) -> None:
        super().__init__()
        self._order = order
        self._last = last

    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        self._order.run_window()
        return self._last.result

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        with torch.enable_grad():
            self._result = self.closure(*args, **kwargs)
        return self._result.loss


class _CheckedClosure(AbstractClosure[ClosureResult]):
    """Runs a step and its backward; then, where it is the last one to be compared, the check."""

    def __init__(self, closure: Closure, check: FirstWindow, *, ends: bool) -> None:
        super().__init__()
        self._closure = closure
        self._check = check
        self._ends = ends

    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._closure.closure(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        loss = self._closure(*args, **kwargs)
        self._check.after_backward(ends=self._ends)
        return loss

    def consume_result(self) -> ClosureResult:
        return self._closure.consume_result()
