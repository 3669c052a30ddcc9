"""Ties a fit to the commits of its engine: its state goes with every step, and comes back."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mt_lightning.engine.engine import Engine
from mt_lightning.errors import ConfigError
from mt_lightning.resume.position import DataPosition, check_resumable
from mt_lightning.resume.run_state import Packer, give_early, give_late, take, unpack

_PATCHED = ("advance", "on_advance_end", "on_run_start")


class RunKeeper:
    """Follows one fit.

    Args:
        trainer: The trainer.
        engine: The attached engine, whose commits carry the state of the run.

    Raises:
        ConfigError: The run to go on with was committed by another kind of loop.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._state = unpack(engine.run_state) if engine.run_state is not None else None
        if engine.num_steps and self._state is None:
            raise ConfigError(
                "offload_dir holds a run that was not trained by Trainer.fit; go on with it where "
                "it was made, or set on_existing='overwrite'."
            )
        self._position = DataPosition(trainer)
        self._packer = Packer()
        self._num_steps = engine.num_steps
        self._last: dict[str, Any] | None = None
        self._max_steps: int | None = None

    def begin(self) -> None:
        """Give a run that goes on what its hooks look at; optimizers and schedulers exist."""
        if self._state is None:
            return
        give_early(self._trainer, self._state)
        loop = self._trainer.fit_loop.epoch_loop
        if not self._state["finished"] and loop.max_steps is not None:
            # The last step may have been taken, but what was due after it has not been done.
            self._max_steps, loop.max_steps = loop.max_steps, -1

    def before_iterator(self) -> None:
        """Take note that the training loader is about to make an iterator."""
        self._position.before_iterator()

    def attach(self) -> None:
        """Follow the loops; called when training starts."""
        loop = self._trainer.fit_loop.epoch_loop
        start, end = loop.on_run_start, loop.on_advance_end

        def on_run_start(fetcher: Any) -> None:
            fit_loop = self._trainer.fit_loop
            again = not fit_loop.is_resuming and not loop.restarting
            if self._trainer.current_epoch > 0 and again:
                self._position.before_iterator()
            start(fetcher)

        def on_advance_end(fetcher: Any) -> None:
            self._end_of_batch()
            end(fetcher)

        loop.__dict__.update(on_run_start=on_run_start, on_advance_end=on_advance_end)
        self._engine.follow(self._take)
        if self._state is not None:
            check_resumable(self._trainer.fit_loop._data_fetcher)
            loop.__dict__["advance"] = self._go_on

    def _go_on(self, fetcher: Any) -> None:
        """Take the place of the first batch: what follows it is what was due."""
        del fetcher
        loop = self._trainer.fit_loop.epoch_loop
        del loop.__dict__["advance"]
        if self._max_steps is not None:
            loop.max_steps, self._max_steps = self._max_steps, None
        assert self._state is not None
        give_late(self._trainer, self._state, self._position)
        self._last, self._state = self._state, None
        self._num_steps = self._engine.num_steps

    def _end_of_batch(self) -> None:
        if self._engine.num_steps != self._num_steps:
            self._num_steps = self._engine.num_steps
            self._engine.end_step(self._take())
            if self._trainer.received_sigterm:
                # Lightning would go on to the end of the epoch; whoever asks to end will not wait.
                raise SIGTERMException

    def _take(self) -> bytes:
        state = take(self._trainer, self._position)
        # Hooks of this batch may still run; what counts is that the batch is done.
        progress = state["loops"]["epoch_loop.batch_progress"]
        for part in ("total", "current"):
            progress[part]["completed"] = progress[part]["processed"]
        self._last = {**state, "finished": False}
        return self._packer.pack(self._last)

    def finish(self) -> None:
        """Take note that training ended as it should: nothing is due any more."""
        if self._last is not None:
            self._engine.end_step(self._packer.pack({**self._last, "finished": True}))

    def detach(self) -> None:
        """Leave the loops alone."""
        loop = self._trainer.fit_loop.epoch_loop
        for name in _PATCHED:
            loop.__dict__.pop(name, None)
