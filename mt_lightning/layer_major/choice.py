"""Whether the batches of a step may run unit by unit in this fit."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from mt_lightning.engine.options import Options
from mt_lightning.engine.plan_choice import Order
from mt_lightning.errors import ConfigError

log = logging.getLogger(__name__)


def choose_order(trainer: pl.Trainer, options: Options) -> Order:
    """Return what may be chosen: False where a fit does something that cannot be followed.

    Raises:
        ConfigError: It does, and layer_major=True.
    """
    if options.layer_major is False or not trainer.lightning_module.automatic_optimization:
        return False
    if options.layer_major == "auto" and options.recompute is False:
        # What the units of all batches of a step save would have to fit, each time.
        log.debug("layer_major='auto': batches run in the usual order, since recompute=False.")
        return False
    reason = _reason(trainer.lightning_module)
    if reason is None:
        return options.layer_major
    if options.layer_major is True:
        raise ConfigError(f"layer_major=True {reason}, or set layer_major=False.")
    log.debug("layer_major='auto': batches run in the usual order. Unit by unit it %s.", reason)
    return False


def _reason(module: pl.LightningModule) -> str | None:
    if type(module).backward is not pl.LightningModule.backward or "backward" in vars(module):
        return (
            "cannot call the module's own backward(): it differentiates all batches of a step "
            "together. Remove the override"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return (
            "cannot follow training_step(self, dataloader_iter), which takes its batches itself. "
            "Take `batch` instead"
        )
    return None
