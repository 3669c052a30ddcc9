"""Catch `torch.nn.utils.clip_grad_*_` on parameters whose gradients are elsewhere."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from mt_lightning.errors import StepError

_NAMES = ("clip_grad_norm_", "clip_grad_value_")

Answer = Callable[..., Any]
"""Called with the name of the function, the function, the list of parameters and its arguments."""


def refuse(
    name: str, function: Callable[..., Any], parameters: list[Any], *_: Any, **__: Any
) -> Any:
    """Raise StepError: the functions would find no gradient and silently clip nothing."""
    raise StepError(
        f"torch.nn.utils.{name} finds no gradients: strategy='megatrain' moves them away as they "
        "arrive. Use Trainer(gradient_clip_val=...), or self.clip_gradients(optimizer, ...)."
    )


class ClipGuard:
    """While attached, clipping paged parameters by torch's functions is answered here.

    Args:
        answer: What to do then.

    [Note: inside the function]
    A module that says `from torch.nn.utils import clip_grad_norm_` holds the function itself, so
    replacing the name would not reach it. What the functions wrap, under `no_grad`, is replaced,
    while any guard is attached; calls without a paged parameter go on to it.
    """

    def __init__(self, answer: Answer = refuse) -> None:
        self.answer = answer
        self.paged: set[int] = set()

    def attach(self, model: nn.Module) -> None:
        """Guard the parameters of `model`."""
        self.paged = {id(param) for param in model.parameters()}
        _guards.add(self)
        if not _kept:
            for name in _NAMES:
                function = getattr(clip_grad, name)
                cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
                cell = dict(cells)["func"]
                _kept.append((cell, cell.cell_contents))
                cell.cell_contents = _guarded(name, cell.cell_contents)

    def detach(self) -> None:
        """Guard nothing; the last one puts torch's functions back."""
        _guards.discard(self)
        if not _guards:
            for cell, original in _kept:
                cell.cell_contents = original
            _kept.clear()


_guards: weakref.WeakSet[ClipGuard] = weakref.WeakSet()
_kept: list[tuple[CellType, Callable[..., Any]]] = []


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        items = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        asked = [guard for guard in _guards if any(id(item) in guard.paged for item in items)]
        if not asked:
            return original(items, *args, **kwargs)
        if len(asked) > 1:
            raise StepError(
                f"torch.nn.utils.{name} was given parameters of {len(asked)} paged models; clip "
                "each by itself."
            )
        return asked[0].answer(name, original, items, *args, **kwargs)

    return clip
