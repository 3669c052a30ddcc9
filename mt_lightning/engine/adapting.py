"""Adapters that would be made of, or merged into, weights which are away.

[Note: what adapters compute from] Merging writes to the weights of a layer. New adapters may be
made of them (DoRA, PiSSA, trained tokens), or of other adapters (weighted sums), and the result is
kept: placeholders in, NaN for ever. What is adapted already is asked through its methods; a layer
that is about to be adapted is seen where it becomes part of the module that wraps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from mt_lightning.errors import StepError

_MERGING = ("merge", "unmerge")
_OF_LAYERS = (*_MERGING, "update_layer")
_OF_ADAPTED = ("add_adapter", "add_weighted_adapter", "inject_adapter")
_OF_TRANSFORMERS = ("add_adapter", "load_adapter")
_WRAPPED_AS = "base_layer"
"""What adapters call the layer that they wrap. Other copies are refused as such."""


class AdapterGuard:
    """Refuses methods of one module while pages hold its weights.

    Args:
        name: Of the module, for the message.
        module: Has the methods.
        methods: Their names.
    """

    def __init__(self, name: str, module: nn.Module, methods: tuple[str, ...]) -> None:
        self._module = module
        self._methods = methods
        for method in methods:
            module.__dict__[method] = _refuser(f"{method}() of {name}", method in _MERGING)

    def remove(self) -> None:
        """Let it compute again."""
        for method in self._methods:
            self._module.__dict__.pop(method, None)


def guard_adapters(root: nn.Module) -> list[AdapterGuard | RemovableHandle]:
    """Guard every adapted, and every adaptable, module of a model; what is returned ends it."""
    guards: list[AdapterGuard | RemovableHandle] = [
        AdapterGuard(name or type(module).__name__, module, methods)
        for name, module in root.named_modules()
        if (methods := _computing(module))
    ]
    return [*guards, register_module_module_registration_hook(_refuse_wrapping(root))]


def _computing(module: nn.Module) -> tuple[str, ...]:
    """Return the methods of a module that compute from weights and keep the result."""
    names: list[str] = []
    if isinstance(getattr(module, _WRAPPED_AS, None), nn.Module):
        names.extend(_OF_LAYERS)
    if isinstance(getattr(module, "peft_config", None), dict):
        names.extend(_OF_ADAPTED)
    # Of the class: an adapted model passes on what it is asked.
    if hasattr(type(module), "_hf_peft_config_loaded"):
        names.extend(_OF_TRANSFORMERS)
    return tuple(name for name in dict.fromkeys(names) if callable(getattr(module, name, None)))


def _refuse_wrapping(root: nn.Module) -> Callable[[nn.Module, str, nn.Module | None], None]:
    # Weakly: the hook is one of the process, and must not keep a model that was forgotten.
    away = {id(module): (name, weakref.ref(module)) for name, module in root.named_modules()}

    def on_registration(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
        if name != _WRAPPED_AS or id(wrapper) in away:
            return
        path, known = away.get(id(module), ("", None))
        if known is not None and known() is module:
            _refuse(f"an adapter ({type(wrapper).__name__}) put around {path}", merging=False)

    return on_registration


def _refuser(what: str, merging: bool) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(what, merging=merging)

    return refuse


def _refuse(what: str, *, merging: bool) -> NoReturn:
    if merging:
        raise StepError(
            f"{what} while its weights are in pages: the result would be written to what stands in "
            "for them. Merge before or after: when fit has returned, or mt.page(...).close(), the "
            "model shows its weights and merges exactly."
        )
    raise StepError(
        f"{what} while its weights are in pages: what is made of them would be made of what stands "
        "in for them, and pages do not take new parameters. Add adapters before the run, so that "
        "they are trained; or after it: when fit has returned, or mt.page(...).close(), the model "
        "shows its weights."
    )
