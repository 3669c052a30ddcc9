"""Train language models far larger than memory, bit for bit, with a plain Lightning Trainer.

Importing this package registers `Trainer(strategy="megatrain")`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from mt_lightning.errors import (
    BudgetError,
    ConfigError,
    CorruptPageError,
    MegaTrainError,
    StepError,
    StorageError,
)
from mt_lightning.losses.chunked import chunked_loss
from mt_lightning.optim.compressed_adamw import CompressedAdamW
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO
from mt_lightning.plugins.grad_norm import grad_norm
from mt_lightning.plugins.precision import MegaTrainPrecision
from mt_lightning.strategy import MegaTrainStrategy

if TYPE_CHECKING:
    from mt_lightning.callbacks import AccessRecorder, PagingMonitor, PagingReport, PagingTrace
    from mt_lightning.export.masters import save_masters
    from mt_lightning.huggingface import (
        CausalLMModule,
        TextDataModule,
        TextSamples,
        Trainer,
        from_pretrained,
        init,
    )
    from mt_lightning.paging import Paged, page

__version__ = "0.1.0"

__all__ = [
    "AccessRecorder",
    "BudgetError",
    "CausalLMModule",
    "CompressedAdamW",
    "ConfigError",
    "CorruptPageError",
    "MegaTrainError",
    "MegaTrainPrecision",
    "MegaTrainStrategy",
    "Paged",
    "PagedCheckpointIO",
    "PagingMonitor",
    "PagingReport",
    "PagingTrace",
    "StepError",
    "StorageError",
    "TextDataModule",
    "TextSamples",
    "Trainer",
    "chunked_loss",
    "from_pretrained",
    "grad_norm",
    "init",
    "page",
    "save_masters",
]

# Imported on first use: transformers takes a second that users of the strategy alone need not wait.
_LAZY = {
    "AccessRecorder": "mt_lightning.callbacks",
    "CausalLMModule": "mt_lightning.huggingface",
    "Paged": "mt_lightning.paging",
    "PagingMonitor": "mt_lightning.callbacks",
    "PagingReport": "mt_lightning.callbacks",
    "PagingTrace": "mt_lightning.callbacks",
    "TextDataModule": "mt_lightning.huggingface",
    "TextSamples": "mt_lightning.huggingface",
    "Trainer": "mt_lightning.huggingface",
    "from_pretrained": "mt_lightning.huggingface",
    "init": "mt_lightning.huggingface",
    "page": "mt_lightning.paging",
    "save_masters": "mt_lightning.export.masters",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# LightningCLI lower-cases a class path that has no arguments and looks it up as a name.
for _name in (
    "megatrain",
    "mt_lightning.megatrainstrategy",
    "mt_lightning.strategy.megatrainstrategy",
):
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, MegaTrainStrategy, "pages on disk under a memory budget")
