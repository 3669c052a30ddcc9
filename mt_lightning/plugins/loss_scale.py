"""The scaled losses of 16-mixed: what torch's GradScaler decides, over gradients that are away."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mt_lightning.engine.engine import Engine
from mt_lightning.errors import ConfigError


class _Verdict:
    """An optimizer to the eyes of a GradScaler: one gradient, which says whether all are finite.

    Args:
        step: What a step of it does.
        finite: Whether they are.
        device: Where the scaler is.
    """

    def __init__(self, step: Callable[[], Any], finite: bool, device: torch.device) -> None:
        self.step = step
        flag = nn.Parameter(torch.zeros(1, device=device))
        flag.grad = torch.full_like(flag, 0.0 if finite else math.inf)
        self.param_groups = [{"params": [flag]}]


class LossScale:
    """Scales losses, and lets an optimizer step where the gradients of scaled losses are finite.

    The gradients are multiplied by 1/scale in the update, before they are clipped. Scales are
    powers of two, so that this costs no bit, whenever it is done.

    Args:
        scaler: Keeps the scale, and changes it.

    Raises:
        ConfigError: Its scale may become another number than a power of two.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:  # pyright: ignore[reportPrivateImportUsage]
        self.scaler = scaler
        factors = {
            "init_scale": scaler.get_scale(),
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
        }
        for name, value in factors.items():
            if scaler.is_enabled() and math.frexp(value)[0] != 0.5:
                raise ConfigError(
                    f"the GradScaler has {name}={value!r}: strategy='megatrain' undoes the scale "
                    "in the update, which is exact for powers of two only. Give it one, as "
                    "torch's own defaults are."
                )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that backward begins with."""
        return self.scaler.scale(loss)

    def step(
        self, engine: Engine, index: int, prepare: Callable[[], None], step: Callable[[], Any]
    ) -> Any:
        """Unscale, clip and step; or skip the step, and change the scale.

        Args:
            engine: Holds the gradients.
            index: The optimizer.
            prepare: Runs hooks and clips, over gradients that are not scaled.
            step: Steps the optimizer.
        """
        live, finite = engine.live, True
        if self.scaler.is_enabled():
            finite = live.unscale(index, 1.0 / self.scaler.get_scale())
        verdict: Any = _Verdict(step, finite, engine.machine.link.device)
        self.scaler.unscale_(verdict)
        prepare()
        result = self.scaler.step(verdict)
        if not finite:
            live.step(index, skip=True)
        self.scaler.update()
        return result
