"""Gradient clipping, bit for bit as `torch.nn.utils`, on gradients seen one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def grad_norm_of(
    grad: torch.Tensor, norm_type: float = 2.0, *, in_float: bool = False
) -> torch.Tensor:
    """Return the norm of one gradient, as `clip_grad_norm_` takes it before combining (0-D).

    Args:
        grad: The gradient.
        norm_type: Order of the norm.
        in_float: Whether the norm is that of the gradient in float32.
    """
    dtype = torch.float32 if in_float else None
    return torch._foreach_norm([grad], norm_type, dtype=dtype)[0]  # pyright: ignore[reportPrivateImportUsage]


def total_norm(
    norms: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], norm_type: float = 2.0
) -> torch.Tensor:
    """Combine per-parameter norms in the order `clip_grad_norm_` does.

    Args:
        norms: One 0-D norm per gradient, in the optimizer's order of parameters.
        dtypes: The dtype of each gradient; torch groups by it before it combines.
        norm_type: Order of the norm.

    Source: `torch.nn.utils.get_total_norm`.
    """
    if not norms:
        return torch.tensor(0.0)
    proxies = [torch.empty(0, dtype=dtype) for dtype in dtypes]
    grouped = _group_tensors_by_device_and_dtype([proxies], with_indices=True)  # type: ignore[list-item]
    order = [index for _, indices in grouped.values() for index in indices]
    return torch.linalg.vector_norm(torch.stack([norms[i] for i in order]), norm_type)


def clip_coefficient(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor that every gradient is multiplied by (0-D, at most 1)."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def all_finite(grad: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, without a temporary of its size."""
    if not grad.numel():
        return True
    # Torch finds largest values ten times slower than it adds squares up. A sum of squares may be
    # infinite where no element is, never the other way round.
    if grad.is_floating_point() and bool(torch.isfinite(grad_norm_of(grad))):
        return True
    return bool(torch.isfinite(torch.linalg.vector_norm(grad, float("inf"))))


@dataclass(frozen=True)
class Clip:
    """What is done to gradients before the optimizer sees them.

    Attributes:
        coefficient: Factor of norm clipping (0-D), None without.
        value: Bound of value clipping, None without.
        unscale: Factor that undoes the scaling of the loss, before all else; None without.
    """

    coefficient: torch.Tensor | None = None
    value: float | None = None
    unscale: float | None = None

    def apply(self, grads: list[torch.Tensor]) -> None:
        """Clip `grads` in place."""
        if not grads:
            return
        if self.unscale is not None:
            torch._foreach_mul_(grads, self.unscale)  # pyright: ignore[reportPrivateImportUsage]
        if self.value is not None:
            torch._foreach_clamp_min_(grads, -self.value)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_clamp_max_(grads, self.value)  # pyright: ignore[reportPrivateImportUsage]
        if self.coefficient is not None:
            torch._foreach_mul_(grads, self.coefficient)  # pyright: ignore[reportPrivateImportUsage]
