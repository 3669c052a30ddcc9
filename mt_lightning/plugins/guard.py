"""Catch `torch.nn.utils.clip_grad_*_` on parameters whose gradients are elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from mt_lightning.errors import StepError

_NAMES = ("clip_grad_norm_", "clip_grad_value_")


class ClipGuard:
    """While attached, clipping paged parameters by torch's functions raises.

    They would find no gradient and silently clip nothing.

    [Note: inside the function]
    A module that says `from torch.nn.utils import clip_grad_norm_` holds the function itself, so
    replacing the name would not reach it. What the functions wrap, under `no_grad`, is replaced.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[CellType, Callable[..., Any]]] = []

    def attach(self, model: nn.Module) -> None:
        """Guard the parameters of `model`."""
        self.detach()
        paged = {id(param) for param in model.parameters()}
        for name in _NAMES:
            function = getattr(clip_grad, name)
            cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
            cell = dict(cells)["func"]
            self._kept.append((cell, cell.cell_contents))
            cell.cell_contents = _guarded(name, cell.cell_contents, paged)

    def detach(self) -> None:
        """Put torch's functions back."""
        for cell, original in reversed(self._kept):
            cell.cell_contents = original
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
