"""Whose masters a checkpoint holds: optimizer state is kept by position, weights by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

MASTER_NAMES = "megatrain_masters"
"""Key of a checkpoint: for each optimizer, the names of its parameters in order."""


def name_masters(
    checkpoint: dict[str, Any], module: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Write down the names of all parameters that have masters, where state is saved with them."""
    if "optimizer_states" not in checkpoint:
        return
    names = {id(param): name for name, param in module.named_parameters()}
    checkpoint[MASTER_NAMES] = [
        [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
        for optimizer in optimizers
    ]
