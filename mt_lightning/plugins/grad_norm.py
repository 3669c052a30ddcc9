"""The norm of gradients that left as they arrived."""

from __future__ import annotations

import lightning.pytorch as pl

from mt_lightning.engine.engine import Engine
from mt_lightning.errors import ConfigError


def grad_norm(trainer: pl.Trainer) -> float | None:
    """Return the gradient norm that the last clipped step had before clipping, None without one.

    Hooks cannot compute it themselves: gradients leave as they arrive, and `p.grad` is None.
    """
    engine = getattr(trainer.strategy, "engine", None)
    if not isinstance(engine, Engine):
        raise ConfigError("grad_norm(trainer) needs a trainer that runs with strategy='megatrain'.")
    return engine.last_norm
