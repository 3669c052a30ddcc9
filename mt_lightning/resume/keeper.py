"""Ties a fit to the commits of its engine: its state goes with every step, and comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.kept import keep
from mt_lightning.errors import ConfigError
from mt_lightning.layer_major.loop import LayerMajor
from mt_lightning.resume.adoption import state_in
from mt_lightning.resume.broken_batch import DUE_KEY, BrokenBatch, step_schedulers
from mt_lightning.resume.buffers import Buffers
from mt_lightning.resume.checkpoints import SavedCheckpoints
from mt_lightning.resume.description import DESCRIPTION_KEY, describe
from mt_lightning.resume.packer import Packer, unpack
from mt_lightning.resume.position import DataPosition, check_resumable
from mt_lightning.resume.run_state import give_early, give_late, take
from mt_lightning.tiers.ledger import PAGING
from mt_lightning.tiers.spans import Span
from mt_lightning.tiers.uninterrupted import uninterrupted

log = logging.getLogger(__name__)

_PATCHED = ("advance", "on_advance_end", "on_run_start")


class RunKeeper:
    """Follows one fit.

    Args:
        trainer: The trainer.
        engine: The attached engine, whose commits carry the state of the run.

    Raises:
        ConfigError: The run to go on with was committed without its state.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._state = unpack(engine.run_state) if engine.run_state is not None else None
        if engine.num_steps and self._state is None:
            raise ConfigError(
                "offload_dir holds a run whose loop cannot be resumed: it was not trained by "
                "Trainer.fit, or its state could not be kept (a warning said so). Set "
                "on_existing='overwrite'."
            )
        name = self._state["kept_buffers"] if self._state is not None else None
        self._buffers = Buffers(trainer.lightning_module, engine.machine.store, name)
        self._description = keep(engine.machine.store, describe(trainer.lightning_module))
        self._position = DataPosition(trainer)
        self._batch = BrokenBatch(trainer, engine)
        self._packer = Packer()
        self._num_steps = engine.num_steps
        self._last: dict[str, Any] | None = None
        self._max_steps: int | None = None
        self.checkpoints = SavedCheckpoints(trainer, engine, self._buffers.name)
        self._order = LayerMajor(trainer, engine)
        engine.follow()

    def begin(self) -> None:
        """Give a run that goes on what its hooks look at; optimizers and schedulers exist."""
        if self._state is None:
            return
        give_early(self._trainer, self._state, self._buffers)
        loop, state = self._trainer.fit_loop.epoch_loop, self._state
        limits = [self._trainer.max_steps, self._trainer.max_epochs]
        if state["finished"] and state["limits"] == limits:
            # Whatever ended it, nothing is left to do.
            self._max_steps, loop.max_steps = loop.max_steps, loop.global_step
        elif not state["finished"] and 0 <= loop.max_steps <= loop.global_step:
            # The last step has been taken, but what was due after it has not been done.
            self._max_steps, loop.max_steps = loop.max_steps, loop.global_step + 1

    def before_iterator(self, loader: object) -> None:
        """Take note that a training loader is about to make an iterator."""
        self._position.before_iterator(loader)

    def attach(self) -> None:
        """Follow the loops; called when training starts."""
        loop = self._trainer.fit_loop.epoch_loop
        start, advance, end = loop.on_run_start, loop.advance, loop.on_advance_end

        def on_run_start(fetcher: Any) -> None:
            fit_loop = self._trainer.fit_loop
            again = not fit_loop.is_resuming and not loop.restarting
            if self._trainer.current_epoch > 0 and again:
                self._position.before_iterator()
            start(fetcher)

        def take_batch(fetcher: Any) -> None:
            if self._state is not None:
                # In place of the first batch; what follows it is what was due.
                self._go_on()
                return
            self._position.before_batch()
            self.checkpoints.begin_batch()
            self._batch.begin()
            try:
                advance(fetcher)
            except StopIteration:
                raise  # the end of an epoch
            except BaseException as error:
                if self._keep_step():
                    self._batch.tell(error)
                raise

        def on_advance_end(fetcher: Any) -> None:
            try:
                with Span("end of batch", account=PAGING):
                    self._end_of_batch()
            except BaseException:
                self._keep_step()
                raise
            self.checkpoints.end_batch()
            end(fetcher)

        loop.__dict__.update(
            on_run_start=on_run_start, advance=take_batch, on_advance_end=on_advance_end
        )
        self._batch.attach()
        self._order.attach()
        if self._state is not None:
            check_resumable(self._trainer.fit_loop._data_fetcher)

    def forget(self) -> None:
        """Let a checkpoint take the place of the state in the commit; its weights come next."""
        self._engine.live.run.steps.commits.replace(None)
        if self._state is not None:
            log.warning(
                "ckpt_path is given: the run goes on from it, and the commits of offload_dir up "
                "to step %d are discarded.",
                self._num_steps,
            )
            self._state = None
            self._restore_limit()

    def adopt(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from the state of a run in a checkpoint, if it holds one.

        Its weights and optimizer state have been loaded, and its loops restored.
        """
        state = state_in(self._trainer, checkpoint)
        if not isinstance(state, str):
            kept = {"kept_buffers": self._buffers.name, DESCRIPTION_KEY: self._description}
            self._state = {**state, **kept}
            steps = self._engine.live.run.steps
            steps.commits.replace(self._packer.pack(self._state))
            steps.commit_now()
            self.begin()
        elif checkpoint.get("global_step"):
            log.warning(
                "the checkpoint is resumed as a standard one, which begins the data of its epoch "
                "anew: %s.",
                state,
            )

    def _restore_limit(self) -> None:
        if self._max_steps is not None:
            self._trainer.fit_loop.epoch_loop.max_steps, self._max_steps = self._max_steps, None

    def _go_on(self) -> None:
        self._restore_limit()
        assert self._state is not None
        give_late(self._trainer, self._state, self._position, self._buffers)
        self._order.give(self._state.get("layer_major"))
        if self._state.get(DUE_KEY):
            step_schedulers(self._trainer)
        self._last, self._state = self._state, None
        self.checkpoints.end_step(self._packer.pack(self._last))

    def _end_of_batch(self) -> None:
        if self._engine.num_steps == self._num_steps or self._engine.gathers:
            return
        self._end_step(self._take())
        self._num_steps = self._engine.num_steps
        if self._trainer.received_sigterm:
            # Lightning would go on to the end of the epoch; whoever asks to end will not wait.
            raise SIGTERMException

    def _keep_step(self) -> bool:
        """Take the state behind the step of a batch that an error broke off, if there is one."""
        step = self._engine.num_steps
        if step == self._num_steps or self._engine.gathers or not self._batch.has_stepped():
            return False
        last = self._last["callbacks"] if self._last is not None else {}
        try:
            with uninterrupted():
                self._batch.show_logged()
                state = self._take(lambda: self._batch.callback_states(last))
            self._num_steps = step
            self._end_step(self._batch.ended(state))
        except Exception:
            log.exception("what step %d has made cannot be kept.", step)
            return False
        return True

    def _take(self, callbacks: Callable[[], dict[str, Any]] | None = None) -> dict[str, Any]:
        state = take(self._trainer, self._position, self._buffers, callbacks)
        return {
            **state,
            "layer_major": self._order.state(),
            "finished": False,
            DESCRIPTION_KEY: self._description,
        }

    def finish(self) -> None:
        """Take note that training ended as it should: nothing is due any more."""
        if self._engine.num_steps != self._num_steps:
            self._last = self._take()
        if self._last is not None:
            self._end_step({**self._last, "finished": True})

    def _end_step(self, state: dict[str, Any]) -> None:
        self._last = state
        packed = self._packer.pack(state)
        self._engine.end_step(packed)
        self.checkpoints.end_step(packed)

    def detach(self) -> None:
        """Leave the loops alone."""
        self._order.detach()
        self._batch.detach()
        self.checkpoints.end()
        self._restore_limit()
        loop = self._trainer.fit_loop.epoch_loop
        for name in _PATCHED:
            loop.__dict__.pop(name, None)
