"""Which device a run computes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties

from mt_lightning.engine.options import Options
from mt_lightning.errors import ConfigError

log = logging.getLogger(__name__)

SUPPORTED = ("cpu", "cuda", "xpu")
"""Types of devices; ROCm calls itself cuda. Others have no streams to copy on beside compute."""


def refuse_devices(devices: Sequence[torch.device] | None) -> None:
    """Refuse what a run cannot compute on.

    Raises:
        ConfigError: There are several devices, or pages cannot be moved to it.
    """
    device, *others = devices or [torch.device("cpu")]
    if others:
        raise ConfigError(
            f"'megatrain' runs on one device, not {len(others) + 1}; use Trainer(devices=1)."
        )
    if device.type not in SUPPORTED:
        raise ConfigError(
            f"strategy='megatrain' cannot move pages to {device}: it computes on "
            f"{', '.join(SUPPORTED)}. Pass Trainer(accelerator='cpu')."
        )


def forget_device(module: pl.LightningModule | None) -> None:
    """Let `module.device` be the CPU, where a parked module is."""
    if module is not None:
        _update_properties(module, device=torch.device("cpu"))


def tell_device(module: pl.LightningModule, device: torch.device, options: Options) -> None:
    """Let `module.device` be where the module computes, although its parameters are on pages."""
    _update_properties(module, device=device)
    if device.type == "cpu" and options.max_vram_gb is not None:
        log.info("max_vram_gb is ignored: the model runs on the CPU.")
