"""Whether a run is to end: whoever waits for its drive asks, and waits no longer."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus


def end_asked(trainer: pl.Trainer) -> Callable[[], bool]:
    """Return what tells, from any thread, whether a signal or an error is ending a trainer's run.

    It does not keep the trainer alive.
    """
    reference = weakref.ref(trainer)

    def asked() -> bool:
        run = reference()
        if run is None:
            return True
        # Set before any callback hears of the exception; Ctrl-C is ignored from then on.
        return run.received_sigterm or run.state.status == TrainerStatus.INTERRUPTED

    return asked
