"""Step the user's own optimizer class on memory that the user's optimizer never sees.

[Note: shadow stepping]
A shadow is an object of the user's class that shares nothing mutable with the user's optimizer. It
is given views of the page in RAM as its parameters, gradients and state, and its own `step` runs on
them. So whatever the class computes is computed, by the same code, to the same bits; and its
hyper-parameters are those of the moment when the step was asked for, not of when the worker gets to
it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mt_lightning.errors import ConfigError

_OWN_ATTRIBUTES = (
    "step",
    "zero_grad",
    "state_dict",
    "load_state_dict",
    "state",
    "param_groups",
)


@dataclass(frozen=True)
class Hyper:
    """What one step of an optimizer depends on, frozen when it was asked for.

    Attributes:
        groups: The param groups without their parameters.
        autocast: Whether it was asked for inside a CPU autocast region (as in manual optimisation)
            and to which dtype: matrix products of the optimizer then run in it.
    """

    groups: tuple[dict[str, Any], ...]
    autocast: tuple[bool, torch.dtype]


def snapshot(optimizer: torch.optim.Optimizer) -> Hyper:
    """Freeze the hyper-parameters of `optimizer`; the scheduler may move on."""
    return Hyper(
        tuple(
            {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in optimizer.param_groups
        ),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    )


@dataclass
class Target:
    """What a step is to update: a parameter, or a slice of one.

    Attributes:
        param: View to update in place, in any shape.
        grad: Its gradient, of the same shape.
        group: Index of its param group.
        state: Its state so far; empty before its first step. Tensors are updated in place.
        position: Position of the parameter among all parameters of the optimizer.
        first: Index of the view's first element inside the parameter, in memory order.
    """

    param: torch.Tensor
    grad: torch.Tensor
    group: int
    state: dict[str, Any]
    position: int = 0
    first: int = 0


class Stepper(Protocol):
    """What can step targets: a shadow of the user's class, or a kernel that stands for it."""

    def is_free(self, hyper: Hyper) -> bool:
        """Return whether it takes the same steps, to the bit, on any number of threads."""
        ...

    def step(self, hyper: Hyper, targets: list[Target]) -> list[dict[str, Any]]:
        """Step every target and return the state of each after it."""
        ...


class Shadow:
    """The twin of one user optimizer; each step makes its own, so threads may share it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._class = type(optimizer)
        self.attributes = {k: v for k, v in optimizer.__dict__.items() if k not in _OWN_ATTRIBUTES}
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self.attributes[name] = OrderedDict()

    def is_free(self, hyper: Hyper) -> bool:
        """See `Stepper.is_free`; nobody knows what the class computes."""
        del hyper
        return False

    @torch.no_grad()
    def step(self, hyper: Hyper, targets: list[Target]) -> list[dict[str, Any]]:
        """Step every target and return the state of each after it."""
        enabled, dtype = hyper.autocast
        for target in targets:
            target.param.grad = target.grad
        with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=False):
            twin = self._run(hyper, targets)
        return [dict(twin.state[t.param]) if t.param in twin.state else {} for t in targets]

    def _run(self, hyper: Hyper, targets: list[Target]) -> torch.optim.Optimizer:
        twin = self._class.__new__(self._class)
        twin.__dict__.update(self.attributes)
        members: dict[int, list[torch.Tensor]] = {}
        for target in targets:
            members.setdefault(target.group, []).append(target.param)
        twin.param_groups = [
            {**entries, "params": members.get(index, [])}
            for index, entries in enumerate(hyper.groups)
        ]
        twin.state = defaultdict(dict)
        for target in targets:
            if target.state:
                twin.state[target.param] = target.state
        self._class.step(twin)
        return twin


def probe_state(
    optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Find what state the optimizer keeps for a parameter by stepping a shadow on zeros.

    Args:
        optimizer: The user's optimizer; it is not touched.
        group: Index of the param group.
        shape: Shape to try; a few elements are enough for an element-wise class.
        dtype: dtype of the parameter.

    Raises:
        ConfigError: The step changed its own param group or kept state outside parameters: updates
            of different parameters are then coupled and cannot run one unit at a time.
    """
    param = torch.zeros(shape, dtype=dtype)
    param.grad = torch.zeros(shape, dtype=dtype)
    shadow = Shadow(optimizer)
    hyper = snapshot(optimizer)
    kept = {k: _copy(v) for k, v in shadow.attributes.items()}
    try:
        with torch.no_grad():
            try:
                twin = shadow._run(hyper, [Target(param, param.grad, group, {})])
            except KeyError:
                begun = _made_at_construction(optimizer, group, shape)
                twin = shadow._run(hyper, [Target(param, param.grad, group, begun)])
    except Exception as error:
        raise ConfigError(
            f"{type(optimizer).__name__} could not take a trial step on a parameter of shape "
            f"{shape}: {error}. paging steps each parameter by itself; an optimizer "
            "that needs all of them at once cannot be paged."
        ) from error
    after = {k: v for k, v in twin.param_groups[group].items() if k != "params"}
    before = hyper.groups[group]
    changed = [k for k, v in after.items() if k not in before or _differs(v, before[k])]
    attributes = [k for k, v in shadow.attributes.items() if _differs(vars(twin).get(k), kept[k])]
    attributes += [k for k in vars(twin) if k not in shadow.attributes and k not in _OWN_ATTRIBUTES]
    if changed or attributes or any(key is not param for key in twin.state):
        what = "state outside its parameters"
        if changed or attributes:
            what = f"its own {', '.join(changed + attributes)}"
        raise ConfigError(
            f"{type(optimizer).__name__} couples its parameters through {what}, so they cannot be "
            "updated one unit at a time. Use an optimizer whose step treats parameters separately, "
            "such as torch.optim.AdamW."
        )
    return dict(twin.state[param]) if param in twin.state else {}


def _made_at_construction(
    optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return state of a parameter of `shape` before its first step; empty where a step makes it.

    Some classes make it as they are built, and cannot step without: Adagrad does up to torch 2.10.
    """
    for param in optimizer.param_groups[group]["params"]:
        state = optimizer.state.get(param)
        if state and param.dim():
            return {
                name: value.new_zeros(shape)
                if isinstance(value, torch.Tensor) and value.shape == param.shape
                else copy.deepcopy(value)
                for name, value in state.items()
            }
    return {}


def check_separable(optimizer: torch.optim.Optimizer, group: int, num_dims: int) -> None:
    """Raise ConfigError when a parameter's update depends on another one, or on random numbers.

    Two small parameters with large gradients are stepped together and one by one, on shadows.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn((4,) * num_dims, generator=generator) for _ in range(4)]

    def step(chosen: list[int]) -> list[torch.Tensor]:
        targets = [
            Target(values[i].clone(), 100 * values[i + 2], group, copy.deepcopy(begun))
            for i in chosen
        ]
        Shadow(optimizer).step(snapshot(optimizer), targets)
        return [target.param for target in targets]

    name, random_state = type(optimizer).__name__, torch.get_rng_state()
    begun: dict[str, Any] = {}
    try:
        together = step([0, 1])
    except KeyError:
        begun = _made_at_construction(optimizer, group, (4,) * num_dims)
        together = step([0, 1])
    drew = not torch.equal(torch.get_rng_state(), random_state)
    torch.set_rng_state(random_state)
    if drew:
        raise ConfigError(
            f"{name} draws random numbers in step(), whose order paging would change. Use an "
            "optimizer without, such as torch.optim.AdamW."
        )
    if not all(torch.equal(a, b) for a, b in zip(together, [*step([0]), *step([1])], strict=True)):
        raise ConfigError(
            f"{name} couples its parameters: one is updated differently when others step "
            f"beside it, so "
            "they cannot be updated one unit at a time. Use an optimizer whose step treats them "
            "separately, such as torch.optim.AdamW."
        )


def _copy(value: Any) -> Any:
    """Copy what a step could change in place; anything else is compared by identity."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _differs(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor):
        same = isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor)
        return not (same and torch.equal(value, before))
    return value is not before and bool(value != before)
