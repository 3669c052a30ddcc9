"""What Lightning keeps for the batch at work in an evaluation loop, swapped with each step."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler


class EvaluationView:
    """Lets a batch find loop and logs as if the batches before it had ended.

    Args:
        trainer: The trainer.
        loop: The loop that runs.
        before: The view of the batch before, where its step has not ended.
    """

    def __init__(self, trainer: pl.Trainer, loop: Any, before: EvaluationView | None) -> None:
        self._trainer: Any = trainer
        self._loop = loop
        self._own = {**self._take()}
        if before is not None:
            self._own.update({**before._own, "is_last_batch": self._own["is_last_batch"]})
        # A profiler cannot tell steps that overlap apart.
        self._own["profiler"] = PassThroughProfiler()
        current, total = (copy.copy(counts) for counts in self._own["progress"])
        for counts in (current, total) if before is not None else ():
            counts.processed += 1
            counts.completed += 1
        self._own["progress"] = (current, total)
        self._main: dict[str, Any] = {}
        self.stays = False
        """Whether the trainer keeps what it shows next: the batch has ended."""

    def enter(self) -> None:
        """Show the trainer as it was at this batch."""
        self._main = self._take()
        self._give(self._own)

    def leave(self) -> None:
        """Keep that, and show the trainer as it is."""
        self._own = self._take()
        self._give(self._main)
        if self.stays:
            self._give({**self._own, "profiler": self._trainer.profiler})

    def _take(self) -> dict[str, Any]:
        trainer, loop = self._trainer, self._loop
        connector, progress = trainer._logger_connector, loop.batch_progress
        kept: dict[str, Any] = {
            "profiler": trainer.profiler,
            "connector": (connector._first_loop_iter, connector._current_fx),
            "progress": (progress.current, progress.total),
            "is_last_batch": progress.is_last_batch,
        }
        if (results := loop._results) is not None:
            kept["results"] = (results.batch, results.batch_size, results.dataloader_idx)
        else:
            kept["indices"] = loop.current_batch_indices
        return kept

    def _give(self, kept: dict[str, Any]) -> None:
        trainer, loop = self._trainer, self._loop
        connector, progress = trainer._logger_connector, loop.batch_progress
        trainer.profiler = kept["profiler"]
        connector._first_loop_iter, connector._current_fx = kept["connector"]
        progress.current, progress.total = kept["progress"]
        progress.is_last_batch = kept["is_last_batch"]
        if (results := loop._results) is not None:
            results.batch, results.batch_size, results.dataloader_idx = kept["results"]
        else:
            loop.current_batch_indices = kept["indices"]
