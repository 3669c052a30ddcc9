"""What Lightning keeps for the batch at work, swapped with each micro-batch."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl


class BatchView:
    """Lets a step that goes on later find the trainer at its own batch.

    So `self.log` adds to what its batch would have added to, and `batch_idx` is its own.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        current, total = (own := self._take())["progress"]
        self._own = {**own, "progress": (copy.copy(current), copy.copy(total))}
        self._own["fx"] = "training_step"
        self._main: dict[str, Any] | None = None

    def replace_batch(self, batch: Any) -> None:
        """Show another batch than the one at work, such as a copy of it."""
        self._own["results"] = (batch, *self._own["results"][1:])

    def enter(self) -> None:
        """Show the trainer as it was at this batch."""
        self._main = self._take()
        self._give(self._own)

    def leave(self) -> None:
        """Keep that, and show the trainer as it is."""
        assert self._main is not None
        self._own = self._take()
        self._give(self._main)

    def _take(self) -> dict[str, Any]:
        trainer = self._trainer
        connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
        results, progress = loop._results, loop.batch_progress
        return {
            "fx": trainer.lightning_module._current_fx_name,
            "connector": (connector._first_loop_iter, connector._current_fx),
            "results": (results.batch, results.batch_size, results.dataloader_idx),
            "progress": (progress.current, progress.total),
            "is_last_batch": progress.is_last_batch,
        }

    def _give(self, kept: dict[str, Any]) -> None:
        trainer = self._trainer
        connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
        results, progress = loop._results, loop.batch_progress
        trainer.lightning_module._current_fx_name = kept["fx"]
        connector._first_loop_iter, connector._current_fx = kept["connector"]
        results.batch, results.batch_size, results.dataloader_idx = kept["results"]
        progress.current, progress.total = kept["progress"]
        progress.is_last_batch = kept["is_last_batch"]
