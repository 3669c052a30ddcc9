"""A run that is begun as the strategy begins it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.machine import open_machine
from mt_lightning.errors import BudgetError
from mt_lightning.planning.training import Training
from mt_lightning.tiers.link import Link


def attached(
    model: nn.Module, directory: Path, training: Training, link: Link | None = None
) -> Engine:
    """Attach a model to pages in `directory`; a budget that is too small leaves nothing open."""
    machine = open_machine([str(directory)], "error", link=link)
    engine = Engine(model, machine, training.options)
    try:
        engine.prepare()
        engine.attach(
            [training.make_optimizer(model)],
            schedule=training.schedule,
            micro_batches=training.accumulate_grad_batches,
            layer_major="auto",
        )
    except BudgetError:
        engine.machine.close()
        raise
    return engine
