"""Experts are chosen once: a replay takes the choice of the first execution.

[Note: near-ties]
A router takes the experts with the largest scores. Where the replay of a unit computes a score with
another last bit, as kernels on an accelerator may, a near-tie is decided differently: other experts
get the gradient than the ones that made the output, or a shape does not fit. So what `topk` and
`argmax` chose is kept, and taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mt_lightning.engine.compiled import runs_compiled

_TOPK = (torch.topk, Tensor.topk)
_ARGMAX = (torch.argmax, Tensor.argmax)


class Routes:
    """Tells whether a unit makes choices, by what its first execution did.

    Args:
        module: The unit. Compiled code is left alone: a mode around it would be traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._may_choose = not runs_compiled(module)
        self._chose = False

    def recording(self, choices: list[Tensor]) -> AbstractContextManager[Any]:
        """Return what keeps the choices of a first execution in `choices`."""
        return _Recording(choices) if self._may_choose else nullcontext()

    def replaying(self, choices: list[Tensor]) -> AbstractContextManager[Any]:
        """Return what lets a replay choose the same."""
        return _Replaying(choices) if choices else nullcontext()

    def executed(self, choices: list[Tensor]) -> None:
        """Take note of what an execution chose; a unit whose first chose nothing is let alone."""
        self._chose |= bool(choices)
        self._may_choose = self._chose


class _Recording(TorchFunctionMode):
    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (*_TOPK, *_ARGMAX):
            chosen = result[1] if func in _TOPK else result
            self._choices.append(chosen.clone())
        return result


class _Replaying(TorchFunctionMode):
    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self._choices: Iterator[Tensor] = iter(choices)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        chosen = next(self._choices, None) if func in (*_TOPK, *_ARGMAX) else None
        if chosen is None:
            return func(*args, **kwargs)
        chosen = chosen.clone()  # user code may write to it, and a replay may come again
        if func in _ARGMAX:
            return chosen
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return torch.return_types.topk(_Chosen.apply(scores, dim, chosen))  # type: ignore[attr-defined]


class _Chosen(torch.autograd.Function):
    """What `topk` gives and saves, had it chosen as before: one tensor of indices."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.dim, ctx.shape = dim, scores.shape
        return scores.gather(dim, chosen), chosen

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.shape).scatter(ctx.dim, chosen, grads[0])
        return grad, None, None
