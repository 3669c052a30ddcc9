"""A batch that broke off behind its optimizer step: the step counts, and a run goes on behind it.

[Note: what an error behind a step costs]
A step is finished before its batch is: schedulers, hooks and loggers come after it. When an error
ends the run there, the state of the run is taken as if the batch had ended, so that the step is
committed and nothing before it is lost with it. Schedulers that had not been stepped are stepped by
the run that goes on. Hooks that had not been called are not called again: one that failed would
fail again, and one that was half through would count twice.

A batch that takes its steps by hand counts only when `training_step` has returned: nobody knows how
many more there were to be.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from mt_lightning.engine.engine import Engine

log = logging.getLogger(__name__)

DUE_KEY = "schedulers_due"
"""Key of a state whose schedulers have not been stepped in its last batch."""

_STEP = "epoch_loop.automatic_optimization.optim_progress"
_SCHEDULERS = "epoch_loop.scheduler_progress"


class BrokenBatch:
    """Follows the batch under way of one fit.

    Args:
        trainer: The trainer.
        engine: The attached engine.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._num_steps = engine.num_steps
        self._before: dict[str, Any] | None = None
        """Schedulers and what they set, before they were stepped in this batch."""
        self._scheduled = False
        """Whether all schedulers have been stepped that are due in this batch."""

    def attach(self) -> None:
        """Follow the schedulers of the loop."""
        loop = self._trainer.fit_loop.epoch_loop
        update = loop.update_lr_schedulers

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if (
                update_plateau_schedulers
                or self._scheduled
                or not loop.trainer.lr_scheduler_configs
            ):
                update(interval, update_plateau_schedulers)
                return
            if self._before is None:
                self._before = self._schedulers()
            update(interval, update_plateau_schedulers)
            self._scheduled = interval == "epoch" or not loop._num_ready_batches_reached()

        loop.__dict__["update_lr_schedulers"] = update_lr_schedulers

    def detach(self) -> None:
        """Leave the loop alone."""
        self._trainer.fit_loop.epoch_loop.__dict__.pop("update_lr_schedulers", None)

    def begin(self) -> None:
        """Take note that a batch begins."""
        self._num_steps, self._before, self._scheduled = self._engine.num_steps, None, False

    @property
    def _has_schedulers(self) -> bool:
        return bool(self._trainer.lr_scheduler_configs)

    def _schedulers(self) -> dict[str, Any]:
        trainer = self._trainer
        return _copy(
            {
                "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
                "optimizers": [
                    [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups]
                    for o in trainer.optimizers
                ],
                "progress": trainer.fit_loop.epoch_loop.scheduler_progress.state_dict(),
            }
        )

    @property
    def _processed(self) -> bool:
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.processed == progress.ready  # type: ignore[attr-defined]

    def has_stepped(self) -> bool:
        """Return whether all steps of this batch have been taken, and there was one."""
        run = self._engine.live.run
        if run.steps.partial or self._engine.num_steps == self._num_steps:
            return False
        if self._processed:
            return True
        module = self._trainer.lightning_module
        if not module.automatic_optimization:
            return False
        own = is_overridden("optimizer_step", module) or "optimizer_step" in vars(module)
        if not own:
            return True
        # It may be about to take another one: then it has begun a forward.
        trained = {page.index for each in run.steps.trained for page in each.pages}
        return run.binder.used.isdisjoint(trained - set(run.build.resident))

    def callback_states(self, last: dict[str, Any]) -> dict[str, Any]:
        """Return the states of callbacks; one that cannot tell its own keeps the one it had.

        Args:
            last: The states at the end of an earlier batch.
        """
        states = {}
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            key = callback.state_key
            try:
                state = callback.state_dict()
            except Exception:
                log.exception("%s: its state is that of the step before.", key)
                state = last.get(key)
            if state:
                states[key] = state
        return states

    def show_logged(self) -> None:
        """Show what was logged in this batch, as its end would have done."""
        try:
            self._trainer._logger_connector.on_batch_end()
        except Exception:
            log.exception("what was logged in the last batch cannot be shown.")

    def ended(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a run as if this batch had ended.

        Args:
            state: As it is now; its counters are copies, and changed.
        """
        loops = state["loops"]
        for progress in ("total", "current"):
            counts = loops["epoch_loop.batch_progress"][progress]
            counts["started"] = counts["processed"] = counts["completed"] = counts["ready"]
            steps = loops[_STEP]["optimizer"]["step"][progress]
            steps["completed"] = steps["ready"]
        if self._scheduled or not self._has_schedulers:
            return state
        before = self._before or self._schedulers()
        loops[_SCHEDULERS] = before["progress"]
        return {
            **state,
            "lr_schedulers": before["lr_schedulers"],
            "optimizers": before["optimizers"],
            DUE_KEY: True,
        }

    def tell(self, error: BaseException) -> None:
        """Warn of what this batch went without."""
        where = "on_train_batch_end" if self._processed else "optimizer_step"
        log.warning(
            "%s behind step %d, before its batch had ended: the step is kept, and a run that goes "
            "on begins behind this batch. What was left to do in %s, and the hooks and loggers "
            "after it, did not see the batch and are not called for it again.",
            type(error).__name__,
            self._engine.num_steps,
            where,
        )


def step_schedulers(trainer: pl.Trainer) -> None:
    """Step the schedulers that were due when the last batch broke off."""
    for optimizer in trainer.optimizers:
        # It has stepped, in another process: torch would warn that it has not.
        optimizer._opt_called = True  # type: ignore[attr-defined]
    loop = trainer.fit_loop.epoch_loop
    loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    if loop._num_ready_batches_reached():
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def _copy(value: Any) -> Any:
    """Copy containers and tensors; schedulers may hold anything else."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {k: _copy(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item) for item in value)
    return value
