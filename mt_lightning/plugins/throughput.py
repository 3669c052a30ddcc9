"""Lightning's ThroughputMonitor, told in which dtype paged training computes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import ThroughputMonitor


def tell_throughput(trainer: Any, dtype: torch.dtype) -> None:
    """Set what the device can do in `dtype`; the monitor takes a plugin it does not know for fp32.

    Args:
        trainer: The Trainer, whose callbacks have been set up.
        dtype: Of matrix products.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, ThroughputMonitor):
            flops = get_available_flops(trainer.strategy.root_device, dtype)
            callback.available_flops = flops
            for throughput in callback._throughputs.values():
                throughput.available_flops = flops
