"""Methods of the user's model and optimizers that lead to the engine, or say why they cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from mt_lightning.errors import StepError

_SCALES = "_step_supports_amp_scaling"


class Checks(Protocol):
    """What looks at a step before it is taken."""

    def check_step(self, optimizer: int) -> None:
        """Raise StepError where it would not be the step of the plain loop."""


class Routes:
    """While attached, the methods are ours.

    Args:
        model: The model.
        optimizers: Its optimizers, whose own methods lead to the engine by now.
        checks: Asked before each step.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], checks: Checks) -> None:
        self._model = model
        self._optimizers = optimizers
        self._checks = checks
        self._kept: list[tuple[dict[str, Any], str, Any]] = []

    def attach(self) -> None:
        """Lead the methods."""
        for index, optimizer in enumerate(self._optimizers):
            own = optimizer.__dict__
            self._put(own, "step", self._step(index, own["step"]))
            self._put(own, "zero_grad", _zero_grad(own["zero_grad"]))
            # A scaler asks for gradients then, which is answered, and hands none to `step`.
            self._put(own, _SCALES, False)
        optimizers = self._optimizers

        def zero_all(set_to_none: bool = True) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none)

        for path, module in self._model.named_modules():
            self._put(module.__dict__, "_apply", _apply(module))
            self._put(module.__dict__, "__deepcopy__", _refuse_copy(path or type(module).__name__))
            self._put(module.__dict__, "zero_grad", zero_all if not path else _refuse_part(path))

    def detach(self) -> None:
        """Leave them as they were; those of optimizers come back with the engine's."""
        for own, name, before in reversed(self._kept):
            if before is None:
                own.pop(name, None)
            else:
                own[name] = before
        self._kept.clear()

    def _put(self, own: dict[str, Any], name: str, value: Any) -> None:
        self._kept.append((own, name, own.get(name)))
        own[name] = value

    def _step(self, index: int, inner: Callable[..., Any]) -> Any:
        checks = self._checks

        @functools.wraps(inner)  # a scheduler finds its mark
        def step(closure: Callable[[], Any] | None = None) -> Any:
            if closure is None:
                checks.check_step(index)
                return inner()

            def evaluate() -> Any:
                loss = closure()
                checks.check_step(index)
                return loss

            return inner(evaluate)

        return step


def _zero_grad(inner: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inner)
    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none:
            raise StepError(
                "zero_grad(set_to_none=False) would leave gradients of zeros, which the next step "
                "applies to parameters that get none; pages do not keep them. Leave "
                "set_to_none out."
            )
        inner()

    return zero_grad


def _apply(module: nn.Module) -> Callable[..., nn.Module]:
    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for dtype, device in {(p.dtype, p.device) for p in module.parameters(recurse)}:
            probe = torch.empty(0, dtype=dtype, device=device)
            if fn(probe) is not probe:
                raise StepError(
                    f"{type(module).__name__} is on pages: its parameters can be moved to no other "
                    "device or dtype. Do that before mt.page, or after close()."
                )
        return type(module)._apply(module, fn, recurse)

    return apply


def _refuse_copy(name: str) -> Callable[[Any], Any]:
    def deep_copy(memo: Any) -> Any:
        raise StepError(
            f"{name} is on pages: a copy would have no weights. Copy it before mt.page; a "
            "reference model is another one that is loaded and paged by itself."
        )

    return deep_copy


def _refuse_part(path: str) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        raise StepError(
            f"{path}.zero_grad() would clear a part of the gradients, which lie together on pages. "
            "Call zero_grad() of the model or of an optimizer."
        )

    return zero_grad
