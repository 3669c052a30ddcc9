"""The run behind linked checkpoints: its room on disk, and the state that lets them go on exactly.

[Note: when a checkpoint gets its state]
`ModelCheckpoint` saves in `on_train_batch_end`, when the step has been taken but the batch has not
ended: other hooks and the counters are still to come. So the state of the run is put beside a
checkpoint when its batch ends, as it goes into the commit of that step. Until then, and for a
checkpoint saved in a validation or at the end of an epoch, it resumes as a standard file does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from pathlib import Path

import lightning.pytorch as pl

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.machine import GIB
from mt_lightning.errors import BudgetError
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO
from mt_lightning.plugins.linked import add_run_state
from mt_lightning.tiers.checkpoint_files import check_room, kept_bytes
from mt_lightning.tiers.manifest import Manifest


class LinkedCheckpoints:
    """What a linked checkpoint asks of the run that it is saved from.

    Args:
        trainer: The trainer; its CheckpointIO plugin is told.
        engine: The engine.
        kept: Name of the file that holds the buffers as they were at the start.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, kept: str) -> None:
        self._engine = weakref.ref(engine)
        self._kept = Path(engine.machine.directories[0]) / kept
        self._waiting: list[tuple[int, Manifest]] = []
        self._in_batch = False
        self._last: tuple[int, bytes | None] = (-1, None)
        """Number of the step that last ended, and the state then."""
        io: object = trainer.strategy.checkpoint_io
        while io is not None and not isinstance(io, PagedCheckpointIO):
            io = getattr(io, "checkpoint_io", None)  # what wraps another one
        if io is not None:
            io.run = self

    def begin_batch(self) -> None:
        """Take note that a batch begins."""
        self._in_batch = True

    def end_batch(self) -> None:
        """Take note that a batch has ended, whether a step was taken or not."""
        self._in_batch = False
        self._waiting.clear()

    def end_step(self, step: int, state: bytes | None) -> None:
        """Put the state at the end of a step beside the checkpoints saved since it was taken."""
        self._last = (step, state)
        for saved_at, manifest in self._waiting:
            # One that was written over since is gone.
            if saved_at == step and state is not None and manifest.folders[0].is_dir():
                add_run_state(manifest, state, self._kept)
        self._waiting.clear()

    def end(self) -> None:
        """Take note that the fit has ended, while its engine still says how far it came."""
        engine = self._engine()
        self._in_batch = False
        self._waiting.clear()
        if engine is None or not engine.attached or engine.num_steps != self._last[0]:
            # A step whose batch did not end: no state goes with these weights.
            self._last = (-1, None)

    def _engine_of(self, files: Iterable[Path]) -> Engine | None:
        """Return the engine if these files are its own: a plugin may serve several runs."""
        engine = self._engine()
        if engine is None:
            return None
        directories = {Path(each) for each in engine.machine.directories}
        return engine if any(directories & set(file.parents) for file in files) else None

    def check(self, sources: Iterable[Path]) -> None:
        """Raise when there is no room to go on once these files are linked.

        Raises:
            BudgetError: `max_disk_gb` does not allow it.
            StorageError: A drive has not that much room.
        """
        files = list(sources)
        engine = self._engine_of(files)
        most = engine.options.max_disk_gb if engine is not None else None
        if engine is not None and most is not None:
            facts = [file.stat() for file in files]
            more = sum(each.st_size for each in facts if each.st_nlink == 1)
            kept = kept_bytes(engine.machine.directories)
            needed = engine.disk_bytes + kept + more
            if needed > most * GIB:
                smallest_gb = math.ceil(needed / GIB * 1e6) / 1e6
                error = BudgetError(
                    f"a linked checkpoint needs {smallest_gb:.6f} GiB on disk in all: "
                    f"{engine.disk_bytes / GIB:.6f} for pages, {kept / GIB:.6f} for checkpoints "
                    f"that are there, {more / GIB:.6f} for this one; but max_disk_gb={most:g} "
                    "allows less. Raise max_disk_gb, or keep fewer checkpoints (save_top_k)."
                )
                error.smallest_gb = smallest_gb
                raise error
        check_room(files)

    def saved(self, manifest: Manifest) -> None:
        """Put the state of the run beside a checkpoint, now or when its batch ends."""
        engine = self._engine_of(manifest.folders)
        if engine is None:
            return
        number, state = self._last
        over = not engine.attached
        if not over and not self._in_batch:
            return
        if over or engine.num_steps == number:
            if state is not None:
                add_run_state(manifest, state, self._kept)
        else:
            self._waiting.append((engine.num_steps, manifest))
