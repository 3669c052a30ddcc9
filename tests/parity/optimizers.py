"""The optimizers of the rows, and a matrix optimizer that no engine can know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

OPTIMIZERS = (
    "adamw",
    "fused_adamw",
    "sgd_momentum",
    "adafactor",
    "matrix",
    "amsgrad",
    "rmsprop",
    "adam_foreach",
)
ELEMENTWISE = frozenset(OPTIMIZERS) - {"adafactor", "matrix"}
NUM_SCHEDULED_STEPS = 40


class Polar(Optimizer):
    """Momentum, made orthogonal by Newton-Schulz steps: every element depends on the whole matrix.

    A parameter of another shape than a matrix moves by its momentum divided by its norm.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            state["num_updates"] = 0
        state["num_updates"] += 1
        momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
        direction = momentum / (momentum.norm() + 1e-7)
        if parameter.dim() == 2:
            for _ in range(2):
                direction = 1.5 * direction - 0.5 * direction @ (direction.t() @ direction)
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])


def make_optimizer(name: str, params: Any) -> Optimizer:
    """Make an optimizer by its name in ``OPTIMIZERS``, over parameters or groups."""
    match name:
        case "adamw":
            return torch.optim.AdamW(params, lr=2e-3, weight_decay=0.05)
        case "fused_adamw":
            return torch.optim.AdamW(params, lr=2e-3, weight_decay=0.05, fused=True)
        case "sgd_momentum":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)
        case "adafactor":
            return torch.optim.Adafactor(params, lr=1e-2)
        case "matrix":
            return Polar(params, lr=2e-2)
        case "amsgrad":
            return torch.optim.AdamW(params, lr=2e-3, amsgrad=True)
        case "rmsprop":
            return torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True)
        case "adam_foreach":
            return torch.optim.Adam(params, lr=2e-3, foreach=True)
    raise ValueError(f"no optimizer is called {name!r}")


def make_muon(params: list[nn.Parameter]) -> Optimizer:
    """Make torch's Muon, which takes matrices only; before torch 2.9, which brought it, another."""
    if not hasattr(torch.optim, "Muon"):
        return make_optimizer("matrix", params)
    return torch.optim.Muon(params, lr=1e-2, weight_decay=0.01)


def parameter_groups(named: list[tuple[str, nn.Parameter]], *, no_decay: bool) -> Any:
    """Return the parameters as one list, or as two groups by their number of dimensions."""
    params = [parameter for _, parameter in named]
    if not no_decay:
        return params
    return [
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
    ]


def make_schedule(name: str, optimizer: Optimizer) -> LRScheduler | None:
    """Make a schedule of the learning rate that moves at every step; None when it is constant."""
    if name == "cosine":
        return CosineAnnealingLR(optimizer, T_max=NUM_SCHEDULED_STEPS)
    if name == "one_cycle":
        group = optimizer.param_groups[0]
        return OneCycleLR(
            optimizer,
            max_lr=[2 * group["lr"] for group in optimizer.param_groups],
            total_steps=NUM_SCHEDULED_STEPS,
            pct_start=0.2,
            cycle_momentum="momentum" in group or "betas" in group,
        )
    return None
