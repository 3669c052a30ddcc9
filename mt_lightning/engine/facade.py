"""The user's optimizer while its parameters are paged: the same object, answered by the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mt_lightning.engine.lazy_state import LazyState
from mt_lightning.errors import StepError
from mt_lightning.tiers.ledger import PAGING
from mt_lightning.tiers.spans import Span

_METHODS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


class Host(Protocol):
    """What a facade asks of the engine."""

    def step(self, optimizer: int) -> bool:
        """Apply gradients."""
        ...

    def zero_grad(self, optimizer: int) -> None:
        """Drop gradients."""

    def optimizer_state(self, optimizer: int) -> dict[int, dict[str, Any]]:
        """Return state by position of the parameter."""
        ...

    def load_optimizer_state(self, optimizer: int, state: dict[int, dict[str, Any]]) -> None:
        """Take state in."""


class OptimizerFacade:
    """Routes one optimizer's methods to the engine until detached."""

    def __init__(self, host: Host, index: int, optimizer: torch.optim.Optimizer) -> None:
        self._host = host
        self._index = index
        self._optimizer = optimizer
        self._kept = {name: optimizer.__dict__.get(name) for name in _METHODS}

    def attach(self) -> None:
        """Put the engine behind the optimizer's methods."""
        host, index, optimizer = self._host, self._index, self._optimizer

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            for hook in optimizer._optimizer_step_pre_hooks.values():
                hook(optimizer, (closure,), {})
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with Span("step", account=PAGING):
                host.step(index)
            optimizer._opt_called = True  # type: ignore[attr-defined]
            for hook in optimizer._optimizer_step_post_hooks.values():
                hook(optimizer, (closure,), {})
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

        def zero_grad(set_to_none: bool = True) -> None:
            del set_to_none
            with Span("zero grad", account=PAGING):
                host.zero_grad(index)

        def state_dict() -> dict[str, Any]:
            packed = type(optimizer).state_dict(optimizer)
            packed["state"] = host.optimizer_state(index)
            return packed

        def load_state_dict(state_dict: dict[str, Any]) -> None:
            bare = {**state_dict, "state": {}}
            type(optimizer).load_state_dict(optimizer, bare)
            host.load_optimizer_state(index, state_dict["state"])

        def add_param_group(param_group: dict[str, Any]) -> None:
            del param_group
            raise StepError(
                "add_param_group() while pages are in use: they are laid out by optimizer at "
                "start. Give every parameter that will ever be trained to the optimizer before, "
                "and freeze by requires_grad=False (BaseFinetuning cannot run)."
            )

        for method in (step, zero_grad, state_dict, load_state_dict, add_param_group):
            optimizer.__dict__[method.__name__] = method

    def detach(self) -> None:
        """Restore the optimizer's own methods."""
        for name, kept in self._kept.items():
            if kept is None:
                self._optimizer.__dict__.pop(name, None)
            else:
                self._optimizer.__dict__[name] = kept

    @property
    def _params(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def show(self, state: dict[int, dict[str, Any]]) -> None:
        """Let the detached optimizer's own `state` show what the pages hold."""
        self._optimizer.state = defaultdict(dict, self._by_param(state))

    def show_later(self, give: Callable[[], dict[int, dict[str, Any]]]) -> None:
        """Let it show what `give` returns once somebody looks."""
        self._optimizer.state = LazyState(lambda: self._by_param(give()))

    def _by_param(self, state: dict[int, dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        params = self._params
        return {params[position]: entries for position, entries in state.items()}

    def take(self) -> dict[int, dict[str, Any]]:
        """Remove and return what the optimizer's own `state` holds."""
        held = self._optimizer.state
        state = {i: dict(held[p]) for i, p in enumerate(self._params) if p in held}
        self._optimizer.state = defaultdict(dict)
        return state
