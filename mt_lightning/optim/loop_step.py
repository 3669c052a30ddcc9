"""The step of torch's Adam without `fused=True`, in one pass over memory and to the same bits.

[Note: who steps]
The kernel steps what it was seen to step exactly as the user's own class does: for each kind of
settings both take some steps on the same values, once, and every bit must agree. Where they differ
(another processor, another release of torch) the class itself steps, as it does at the first step
of each parameter, which makes the state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from mt_lightning.optim.packed.loop_kernel import step_loop
from mt_lightning.optim.packed.threads import in_pieces
from mt_lightning.optim.shadow import Hyper, Shadow, Stepper, Target
from mt_lightning.optim.torch_root import HIGH_ACCURACY, on_this_thread, root_address

_logger = logging.getLogger(__name__)

_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
_PIECE_NUMEL = 1 << 18
"""Elements that one thread takes at a time; less than two pieces run in the caller's thread."""

_CHECKED_NUMEL = 4099
_MOMENTS = ("exp_avg", "exp_avg_sq")
_TOP = "max_exp_avg_sq"


@dataclass(frozen=True)
class Kind:
    """What decides which operations torch takes.

    Attributes:
        optimizer: Adam or AdamW.
        amsgrad: As in the param group.
        foreach: As in the param group.
        maximize: As in the param group.
        decoupled: Whether weights decay by themselves.
        decays: Whether there is weight decay.
    """

    optimizer: type[torch.optim.Optimizer]
    amsgrad: bool
    foreach: bool | None
    maximize: bool
    decoupled: bool
    decays: bool


def stepper_for(optimizer: torch.optim.Optimizer) -> Stepper:
    """Return what steps pages for `optimizer`."""
    shadow = Shadow(optimizer)
    return LoopStepper(type(optimizer), shadow) if type(optimizer) in _CLASSES else shadow


class LoopStepper:
    """Stands for `torch.optim.Adam` or `torch.optim.AdamW` where it takes the very same steps.

    Args:
        optimizer: One of the two classes.
        shadow: Steps everything else.
    """

    def __init__(self, optimizer: type[torch.optim.Optimizer], shadow: Shadow) -> None:
        self._class = optimizer
        self._shadow = shadow

    def is_free(self, hyper: Hyper) -> bool:
        """See `Stepper.is_free`: so are torch's own loops, which the kernel stands for."""
        return all(kind_of(self._class, group) is not None for group in hyper.groups)

    @torch.no_grad()
    def step(self, hyper: Hyper, targets: list[Target]) -> list[dict[str, Any]]:
        """Step every target and return the state of each after it."""
        kinds = [kind_of(self._class, group) for group in hyper.groups]
        autocast, _ = hyper.autocast
        after: dict[int, dict[str, Any]] = {}
        others: list[int] = []
        for i, target in enumerate(targets):
            kind = kinds[target.group]
            if kind is None or autocast or not _fits(kind, target) or not agrees(kind):
                others.append(i)
            else:
                after[i] = _step(hyper.groups[target.group], kind, target)
        if others:
            stepped = self._shadow.step(hyper, [targets[i] for i in others])
            after.update(zip(others, stepped, strict=True))
        return [after[i] for i in range(len(targets))]


def kind_of(optimizer: type[torch.optim.Optimizer], group: dict[str, Any]) -> Kind | None:
    """Return what decides on a group's operations, None where the kernel has none of them."""
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    other = group.get("fused") or group.get("capturable") or group.get("differentiable")
    if other or not all(isinstance(number, (int, float)) for number in numbers):
        return None
    if group["betas"][0] <= 0.5:  # torch interpolates from the other end, to other signs of zero
        return None
    return Kind(
        optimizer,
        bool(group["amsgrad"]),
        group.get("foreach"),
        bool(group["maximize"]),
        bool(group.get("decoupled_weight_decay", optimizer is torch.optim.AdamW)),
        group["weight_decay"] != 0,
    )


@cache
def agrees(kind: Kind) -> bool:
    """Return whether the kernel agrees bit for bit with torch on this processor."""
    generator = torch.Generator().manual_seed(0)

    def values() -> torch.Tensor:
        spread = torch.randint(-30, 4, (_CHECKED_NUMEL,), generator=generator, device="cpu")
        drawn = torch.randn(_CHECKED_NUMEL, generator=generator, dtype=torch.float32, device="cpu")
        return torch.ldexp(drawn, spread)

    decay = 0.1 if kind.decays else 0.0
    settings: Any = {"amsgrad": kind.amsgrad, "foreach": kind.foreach, "maximize": kind.maximize}
    if kind.decoupled != (kind.optimizer is torch.optim.AdamW):
        settings["decoupled_weight_decay"] = kind.decoupled
    param = torch.nn.Parameter(values())
    constructor: Any = kind.optimizer
    optimizer = constructor([param], lr=1e-3, weight_decay=decay, **settings)
    ours = param.detach().clone()
    state: dict[str, Any] = {}
    same = True
    for step in range(3):
        param.grad = values()
        optimizer.step()
        theirs = optimizer.state[param]
        if step:
            grad = param.grad.clone()
            state = _step(optimizer.param_groups[0], kind, Target(ours, grad, 0, state))
        else:
            state = {key: value.clone() for key, value in theirs.items()}
            ours.copy_(param.detach())
        same &= torch.equal(ours, param.detach())
        same &= all(torch.equal(state[key], theirs[key]) for key in theirs)
    if not same:
        _logger.info("%s is stepped by torch itself, which rounds differently here.", kind)
    return same


def _fits(kind: Kind, target: Target) -> bool:
    """Return whether the target has been stepped before, and all of it is plain float32."""
    state = target.state
    keys = {"step", *_MOMENTS, _TOP} if kind.amsgrad else {"step", *_MOMENTS}
    step = state.get("step")
    if state.keys() != keys or not isinstance(step, torch.Tensor) or step.numel() != 1:
        return False
    tensors = [target.param, target.grad, *(state[key] for key in keys if key != "step")]
    return step.dtype == torch.float32 and all(
        tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu"
        for tensor in tensors
    )


def _step(group: dict[str, Any], kind: Kind, target: Target) -> dict[str, Any]:
    step = target.state["step"] + 1
    p, g = _values(target.param), _values(target.grad)
    m, v = (_values(target.state[key]) for key in _MOMENTS)
    top = _values(target.state[_TOP]) if kind.amsgrad else v[:0]
    constants = _constants(group, kind, step.item())
    root = root_address()

    def run(a: int, b: int) -> None:
        with on_this_thread():
            stretch = slice(a, b)
            moments = m[stretch], v[stretch], top[stretch]
            step_loop(p[stretch], g[stretch], *moments, constants, root, HIGH_ACCURACY)

    in_pieces(len(p), _PIECE_NUMEL, None, run)
    return {**target.state, "step": step}


def _constants(group: dict[str, Any], kind: Kind, step: float) -> np.ndarray:
    """Return the kernel's constants, each computed in double as torch does, and rounded once."""
    beta1, beta2 = group["betas"]
    lr, weight_decay = group["lr"], group["weight_decay"]
    with np.errstate(over="ignore"):  # a rate beyond float32 is infinite, as in torch
        return np.array(
            [
                1 - lr * weight_decay if kind.decoupled else 1.0,
                1 - beta1,
                beta2,
                1 - beta2,
                -(lr / (1 - beta1**step)),
                (1 - beta2**step) ** 0.5,
                group["eps"],
                0.0 if kind.decoupled else weight_decay,
                -1.0 if kind.maximize else 1.0,
            ],
            dtype=np.float32,
        )


def _values(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).numpy()
