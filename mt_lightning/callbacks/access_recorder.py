"""AccessRecorder: write down in which order a run uses its units."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mt_lightning.errors import ConfigError

_MAX_ACCESSES = 1 << 20


class AccessRecorder(Callback):
    """Write the units that a fit uses, in order, as JSON for `megatrain bench prefetch --file`.

    The file holds the names of the units and, for each optimizer step, pairs of a unit's number and
    a kind of use: 0 forward, 1 backward, 2 forward without gradients. Recording ends by itself
    after about a million uses. Under another strategy than megatrain it is an error.

    Args:
        path: The file; one that exists is replaced when fit ends.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._steps: list[list[tuple[int, int]]] = []
        self._step: list[tuple[int, int]] = []
        self._num_steps = self._num_accesses = 0
        self._names: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to record.

        Raises:
            ConfigError: The strategy pages nothing.
        """
        engine = getattr(trainer.strategy, "engine", None)
        if engine is None or not engine.attached:
            raise ConfigError(
                f"AccessRecorder(path={str(self._path)!r}) records strategy='megatrain', not "
                f"{type(trainer.strategy).__name__}; remove it, or use that strategy."
            )
        self._steps, self._step = [], []
        self._num_steps, self._num_accesses = trainer.global_step, 0
        self._names = [unit.name for unit in engine.live.run.build.units]
        engine.live.run.ahead.on_access = self._note

    def _note(self, unit: int, kind: int) -> None:
        if self._num_accesses < _MAX_ACCESSES:
            self._num_accesses += 1
            self._step.append((unit, kind))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step where the optimizer has stepped."""
        if trainer.global_step > self._num_steps:
            self._num_steps = trainer.global_step
            self._end_step()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        self._end_step()
        trace = {"units": self._names, "steps": self._steps}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(trace, separators=(",", ":")))

    def _end_step(self) -> None:
        if self._step:
            self._steps.append(self._step)
            self._step = []
