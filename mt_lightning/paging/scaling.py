"""Answer torch's `GradScaler`, which looks for gradients that are on pages.

[Note: unscaled when they are stepped] Gradients are multiplied by 1/scale in the update, before
they are clipped; whether all of them are finite is said at once, as the scaler asks for it. Scales
are powers of two, so that no bit depends on when it is done.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from mt_lightning.errors import StepError

_NAME = "_unscale_grads_"

Unscale = Callable[[int, float], "bool | None"]
"""Undoes the scale of an optimizer's gradients when it steps; returns whether all are finite, None
where there are none."""


class ScalerGuard:
    """While attached, every scaler that looks for the gradients of paged optimizers is answered.

    Args:
        optimizers: The optimizers.
        unscale: Called with the index of one, and 1/scale.
    """

    def __init__(self, optimizers: Sequence[Optimizer], unscale: Unscale) -> None:
        self._optimizers = list(optimizers)
        self._unscale = unscale

    def attach(self) -> None:
        """Answer scalers; the first guard changes the method that all of them have."""
        if not _guards:
            _kept.append(getattr(GradScaler, _NAME))
            setattr(GradScaler, _NAME, _guarded(_kept[0]))
        _guards.add(self)

    def detach(self) -> None:
        """Answer none; the last guard puts torch's method back."""
        _guards.discard(self)
        if not _guards and _kept:
            setattr(GradScaler, _NAME, _kept.pop())

    def answer(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> dict[torch.device, torch.Tensor] | None:
        """Return what the scaler wants to know, None where the optimizer is none of ours.

        Raises:
            StepError: The scale is no power of two.
        """
        index = next((i for i, mine in enumerate(self._optimizers) if mine is optimizer), None)
        if index is None:
            return None
        factor = float(inv_scale)
        if math.frexp(factor)[0] != 0.5:
            raise StepError(
                f"the GradScaler's scale is {1 / factor:g}, and pages undo it in the update, which "
                "is exact for powers of two only. Nothing was changed. Give init_scale, "
                "growth_factor and backoff_factor that are powers of two, as torch's defaults are."
            )
        finite = self._unscale(index, factor)
        return {} if finite is None else {found_inf.device: found_inf + float(not finite)}


_guards: weakref.WeakSet[ScalerGuard] = weakref.WeakSet()
_kept: list[Callable[..., Any]] = []


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscale_grads(
        scaler: Any,
        optimizer: Any,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        for guard in list(_guards):
            answer = guard.answer(optimizer, inv_scale, found_inf)
            if answer is not None:
                return answer
        return original(scaler, optimizer, inv_scale, found_inf, allow_fp16)

    return unscale_grads
