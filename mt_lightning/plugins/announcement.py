"""What a fit says when it begins: when pages are updated, and what the planner expects."""

from __future__ import annotations

import logging

import lightning.pytorch as pl

from mt_lightning.engine.engine import Engine
from mt_lightning.planning.outlook import Outlook, outlook
from mt_lightning.plugins.refusals import micro_batches

log = logging.getLogger(__name__)


def announce(trainer: pl.Trainer, engine: Engine, reason: str | None) -> Outlook:
    """Say it, and return what the planner expects.

    Args:
        trainer: The trainer.
        engine: The attached engine.
        reason: Why updates cannot be eager, None where they can.
    """
    assert engine.plan is not None
    why = reason or "not every step is committed"
    eager = engine.plan.schedule == "eager"
    log.info("updates are %s", "eager" if eager else f"deferred: {why}")
    expected = outlook(
        engine.live.run.build,
        engine.plan,
        engine.options,
        optimizers=trainer.optimizers,
        micro_batches=micro_batches(trainer),
        precision=str(trainer.precision),
    )
    text = expected.text()
    if text:
        log.info("%s", text)
    return expected
