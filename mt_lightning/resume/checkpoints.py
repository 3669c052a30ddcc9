"""The run behind checkpoints: its room on disk, and the state that lets them go on exactly.

[Note: which state goes with a checkpoint]
A run goes on from the end of a batch in which a step was taken, as `take` describes. A checkpoint
that is saved later than that, in a validation, at the end of an epoch, among batches that only
gather gradients, or on an error, has the weights of that moment still, and gets its state at once:
the run that goes on does again what came after it. `ModelCheckpoint` by number of steps saves in
`on_train_batch_end`, when the step has been taken but the batch has not ended: other hooks and the
counters are still to come. Then the state follows when the batch ends. Where a hook has written to
weights in between, state and weights do not belong together, and there is none.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import lightning.pytorch as pl

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.machine import GIB
from mt_lightning.errors import BudgetError
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO, RunState
from mt_lightning.tiers.checkpoint_files import check_room, kept_bytes

_WRITTEN = "a hook wrote to weights after the step"
_UNREADABLE = "the state of its run could not be kept, as a warning said"


def serve(io: object, run: SavedCheckpoints | None) -> None:
    """Let a CheckpointIO plugin, or the one that it wraps, ask this run about what it saves."""
    while io is not None and not isinstance(io, PagedCheckpointIO):
        io = getattr(io, "checkpoint_io", None)
    if io is not None:
        io.run = run


class SavedCheckpoints:
    """What a checkpoint asks of the run that it is saved from.

    Args:
        trainer: The trainer; its CheckpointIO plugin is told.
        engine: The engine.
        kept: Name of the file that holds the buffers as they were at the start.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, kept: str) -> None:
        self._engine = weakref.ref(engine)
        self._kept = Path(engine.machine.directories[0]) / kept
        self._waiting: list[tuple[int, int, Callable[[bytes, Path], None]]] = []
        """Step and number of edits at which a checkpoint was saved, and who puts its state."""
        self._in_batch = False
        self._last: tuple[int, int, bytes | str | None] = (-1, 0, None)
        """Step and number of edits when a step last ended, and the state then or why none."""
        serve(trainer.strategy.checkpoint_io, self)

    def begin_batch(self) -> None:
        """Take note that a batch begins."""
        self._in_batch = True

    def end_batch(self) -> None:
        """Take note that a batch has ended, whether a step was taken or not."""
        self._in_batch = False
        self._waiting.clear()

    def end_step(self, state: bytes | None) -> None:
        """Give the state at the end of a step to the checkpoints saved since it was taken."""
        engine = self._engine()
        assert engine is not None
        if any(saved_step == engine.num_steps for saved_step, _, _ in self._waiting):
            engine.live.find_edits()
        step, edits = engine.num_steps, _num_edits(engine)
        self._last = (step, edits, state)
        for saved_step, saved_edits, put in self._waiting:
            if state is not None and (saved_step, saved_edits) == (step, edits):
                put(state, self._kept)
        self._waiting.clear()

    def end(self) -> None:
        """Take note that the fit has ended, while its engine still says how far it came."""
        engine = self._engine()
        self._in_batch = False
        self._waiting.clear()
        if engine is None or not engine.attached or engine.num_steps != self._last[0]:
            # A step whose batch did not end: no state goes with these weights.
            self._last = (-1, 0, "the batch of its last step never ended")

    def state(self) -> RunState | str | None:
        """See `SavingRun`."""
        engine = self._engine()
        if engine is None:
            return "its run has ended"
        step, edits, state = self._last
        if engine.attached:
            if engine.num_steps != step:
                return None if self._in_batch else "no batch of its run had ended"
            if _num_edits(engine) != edits:
                return _WRITTEN
        elif engine.num_lost:
            return "its fit failed, and went back to an earlier step"
        return (state, self._kept) if isinstance(state, bytes) else state or _UNREADABLE

    def when_known(self, put: Callable[[bytes, Path], None]) -> None:
        """See `SavingRun`."""
        engine = self._engine()
        if engine is not None and self._in_batch:
            self._waiting.append((engine.num_steps, _num_edits(engine), put))

    def check(self, sources: Iterable[Path]) -> None:
        """Raise when there is no room to go on once these files are linked.

        Raises:
            BudgetError: `max_disk_gb` does not allow it.
            StorageError: A drive has not that much room.
        """
        files = list(sources)
        engine = self._engine()
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


def _num_edits(engine: Engine) -> int:
    """Return how often weights or state were written outside a step, as far as that is known."""
    run = engine.live.run
    return run.steps.commits.num_edits + run.writer.dirty
