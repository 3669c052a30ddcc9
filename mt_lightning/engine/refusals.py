"""Models that cannot be paged, refused before anything is done to them."""

from __future__ import annotations

import torch
from torch import nn

from mt_lightning.errors import ConfigError


def refuse_model(root: nn.Module, device: torch.device) -> None:
    """Refuse a model with a parameter that cannot live on pages.

    Args:
        root: The model.
        device: Where it will compute.

    Raises:
        ConfigError: Names the module or parameter and the way out.
    """
    for name, module in root.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"{name} ({type(module).__name__}) makes sparse gradients, which paging "
                "cannot take. Set sparse=False."
            )
    for name, param in root.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"{name} is a lazy parameter without a shape; run one batch through the model "
                "before training, or use the module's non-lazy class."
            )
        if param.device.type not in ("cpu", "meta", device.type):
            raise ConfigError(
                f"{name} is on {param.device}; paging starts from parameters on "
                "the CPU or on meta. Do not move the model yourself."
            )
