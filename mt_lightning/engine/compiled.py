"""Units that torch.compile has made: their compiled code runs where their weights are.

[Note: inside, not around]
`unit.compile()` compiles the call of a module with all that it does: hooks, and `forward`, which is
ours while pages are attached. Binding pages must not become part of a graph. So the call of an
attached unit is the ordinary one again, and in it, with the weights in memory, runs the compiled
one, which finds the module as it was when it was compiled: with its own `forward` and without
hooks, for these have run already. Weights are inputs of the graph, so one serves all layers alike.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mt_lightning.engine.units import Unit, is_wrapper
from mt_lightning.errors import ConfigError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CompiledCall:
    """The compiled call of a unit, to be run instead of its `forward`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._call = module._compiled_call_impl
        self._bare: dict[str, Any] = {name: OrderedDict() for name in _HOOKS}
        self._own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on weights that are in memory."""
        assert self._call is not None
        attributes = self._module.__dict__
        kept = {name: attributes[name] for name in (*_HOOKS, "forward")}
        # Where there are no hooks nothing is exchanged: a graph is guarded by what it looked at.
        attributes.update({name: bare for name, bare in self._bare.items() if kept[name]})
        if self._own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self._own
        try:
            return self._call(*args, **kwargs)
        finally:
            attributes.update(kept)

    def attach(self) -> None:
        """Make the module's own call an ordinary one."""
        self._module._compiled_call_impl = None

    def detach(self) -> None:
        """Undo `attach`."""
        self._module._compiled_call_impl = self._call


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that code compiled around it calls as ordinary code.

    A step that was compiled, or a layer that is compiled while pages are attached, enters units in
    its trace. Binding pages is not for tracing; compiled calls inside still run.
    """
    dynamo = sys.modules.get("torch._dynamo")  # not there: nothing was compiled, and it takes long
    if dynamo is None:
        return function
    # `functools.wraps` took it over from a compiled `forward`: torch 2.8 would call that one alone.
    vars(function).pop("_torchdynamo_orig_callable", None)
    return dynamo.disable(function)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code."""
    return is_wrapper(module) or module._compiled_call_impl is not None


def runs_compiled(module: nn.Module) -> bool:
    """Return whether a module or anything in it runs compiled code."""
    return any(
        is_compiled(each) or hasattr(each.__dict__.get("forward"), "_torchdynamo_orig_callable")
        for each in module.modules()
    )


def refuse_compiled(root: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse code that was compiled across units: it would read weights that are not there.

    Raises:
        ConfigError: Names the module and the way out.
    """
    inside = {id(unit.module): unit.name for unit in units}
    for name, module in root.named_modules():
        if not is_compiled(module):
            continue
        parts = (each for each in module.modules() if each is not module)
        held = [inside[id(part)] for part in parts if id(part) in inside]
        if held:
            raise ConfigError(
                f"{name or type(module).__name__} was compiled as a whole, and {len(held)} units "
                f"in it are paged (the first is {held[0]}): compiled code would read weights that "
                "are not in memory. Compile the units instead: for layer in model.layers: "
                "layer.compile()."
            )
