"""Train language models far larger than memory, bit for bit, with a plain Lightning Trainer.

Importing this package registers `Trainer(strategy="megatrain")`.
"""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from mt_lightning.errors import (
    BudgetError,
    ConfigError,
    CorruptPageError,
    MegaTrainError,
    StepError,
    StorageError,
)
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO
from mt_lightning.plugins.precision import MegaTrainPrecision
from mt_lightning.strategy import MegaTrainStrategy, grad_norm

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptPageError",
    "MegaTrainError",
    "MegaTrainPrecision",
    "MegaTrainStrategy",
    "PagedCheckpointIO",
    "StepError",
    "StorageError",
    "grad_norm",
]

# LightningCLI lower-cases a class path that has no arguments and looks it up as a name.
for _name in (
    "megatrain",
    "mt_lightning.megatrainstrategy",
    "mt_lightning.strategy.megatrainstrategy",
):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, MegaTrainStrategy, "pages on disk under a memory budget")
