"""Adapters that would be merged into weights which are away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mt_lightning.errors import StepError

_METHODS = ("merge", "unmerge")


class MergeGuard:
    """Refuses to merge one adapted layer while pages hold its weights.

    Args:
        name: Of the module, for the message.
        module: Has `merge`, and a `base_layer` that it writes to.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._module = module
        for method in _METHODS:
            module.__dict__[method] = _refuse(name, method)

    def remove(self) -> None:
        """Let it merge again."""
        for method in _METHODS:
            self._module.__dict__.pop(method, None)


def guard_merges(root: nn.Module) -> list[MergeGuard]:
    """Guard every adapted layer of a model; the guards remove themselves."""
    return [
        MergeGuard(name, module)
        for name, module in root.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Module)
        and all(callable(getattr(module, method, None)) for method in _METHODS)
    ]


def _refuse(name: str, method: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise StepError(
            f"{method}() of {name} while its weights are in pages: the result would be written to "
            "what stands in for them. Merge before or after: when fit has returned, or "
            "mt.page(...).close(), the model shows its weights and merges exactly."
        )

    return refuse
