"""Catch `torch.nn.utils.clip_grad_*_` on parameters whose gradients are elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from mt_lightning.errors import StepError

_NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


class ClipGuard:
    """While attached, clipping paged parameters by torch's functions raises.

    They would find no gradient and silently clip nothing.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, str, Callable[..., Any]]] = []

    def attach(self, model: nn.Module) -> None:
        """Guard the parameters of `model`."""
        self.detach()
        paged = {id(param) for param in model.parameters()}
        for place in (torch.nn.utils, clip_grad):
            for name in _NAMES:
                original = getattr(place, name, None)
                if original is not None:
                    self._kept.append((place, name, original))
                    setattr(place, name, _guarded(name, original, paged))

    def detach(self) -> None:
        """Put torch's functions back."""
        for place, name, original in reversed(self._kept):
            setattr(place, name, original)
        self._kept.clear()


def _guarded(name: str, original: Callable[..., Any], paged: set[int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        items = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(id(item) in paged for item in items):
            raise StepError(
                f"torch.nn.utils.{name} finds no gradients: strategy='megatrain' moves them "
                f"away as they "
                "arrive. Use Trainer(gradient_clip_val=...), or self.clip_gradients(optimizer, "
                "...)."
            )
        return original(items, *args, **kwargs)

    return clip
