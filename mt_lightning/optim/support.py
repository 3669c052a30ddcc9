"""Which optimizers can be stepped piece by piece, and which cannot be paged at all."""

from __future__ import annotations

import torch

from mt_lightning.errors import ConfigError

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Classes whose update of one element depends on that element alone. Exact types: a subclass may
override anything, so it sees whole tensors."""

REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it calls the closure several times per step and couples all parameters",
    torch.optim.SparseAdam: "it needs sparse gradients, which leave no dense page to update",
}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` may be stepped on slices of a parameter."""
    return type(optimizer) in ELEMENTWISE


def check_supported(optimizer: object) -> None:
    """Raise ConfigError when `optimizer` cannot be stepped parameter by parameter."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"configure_optimizers returned {name}, which is not a torch.optim.Optimizer; "
            "paging steps torch optimizers only."
        )
    for refused, reason in REFUSED.items():
        if isinstance(optimizer, refused):
            raise ConfigError(
                f"{name} cannot be paged: {reason}. "
                "Return another optimizer from configure_optimizers, such as torch.optim.AdamW."
            )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ConfigError(
                f"{name}(differentiable=True) cannot be paged: parameters are updated outside "
                "autograd. Set differentiable=False."
            )
