"""Find the units of a model, the modules that run as one piece: by rule, without a model table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from mt_lightning.errors import ConfigError

RESIDENT_BYTES = 16 << 10
"""A module beside the layers with fewer bytes stays in RAM: its page would be all overhead."""


@dataclass
class Unit:
    """One module that is bound, run and released as a whole.

    Attributes:
        index: Position in the order of the model.
        name: Qualified name of the module.
        module: The module.
        pages: Indices of the pages it needs, filled when pages are laid out.
    """

    index: int
    name: str
    module: nn.Module
    pages: list[int] = field(default_factory=list)


def find_units(
    root: nn.Module,
    class_names: Sequence[str] | None = None,
    resident: Sequence[str] | None = None,
) -> list[Unit]:
    """Return the units of `root` in the order of the model.

    Layers are, in this order of preference: modules whose class (or a base class) bears one of
    `class_names`; transformers' `GradientCheckpointingLayer`; the items of the outermost
    `ModuleList` or `Sequential`. Beside the layers, every topmost module that holds parameters
    itself is a unit. What no unit holds (parameters of a module that contains layers, tiny modules,
    the modules whose names end in one of `resident`) stays in RAM.

    Raises:
        ConfigError: A name matches no module.
    """
    stays = resident_modules(root, resident)
    layers = [layer for layer in _layers(root, class_names) if id(layer[1]) not in stays]
    chosen: dict[int, str] = {id(module): name for name, module in layers}
    _rest("", root, chosen, {id(root), *stays})
    return [
        Unit(index, name, module)
        for index, (name, module) in enumerate(
            (name, module) for name, module in root.named_modules() if id(module) in chosen
        )
    ]


def resident_modules(root: nn.Module, names: Sequence[str] | None) -> set[int]:
    """Return the modules whose names end in one of `names`, and all that they hold, by `id`.

    Raises:
        ConfigError: A name matches no module.
    """
    found: set[int] = set()
    for wanted in names or ():
        modules = [m for path, m in root.named_modules() if f".{path}".endswith(f".{wanted}")]
        if not any(True for module in modules for _ in module.parameters()):
            owners = [name.rpartition(".")[0] for name, _ in root.named_parameters()]
            near = get_close_matches(wanted, owners, 3, cutoff=0.5) or owners[-1:]
            raise ConfigError(
                f"resident={list(names or ())}: no module of {type(root).__name__} with parameters "
                f"is called {wanted}. Give names of named_modules(), or their ends, such as "
                f"{', '.join(near)}."
            )
        found.update(id(inner) for module in modules for inner in module.modules())
    return found


def _layers(root: nn.Module, class_names: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    if class_names:
        found = _outermost(root, lambda module: bool(_bases(module) & set(class_names)))
        seen = set().union(*(_bases(module) for _, module in found)) if found else set()
        missing = [name for name in class_names if name not in seen]
        inner = [name for name in missing if any(name in _bases(m) for m in root.modules())]
        if inner:
            raise ConfigError(
                f"units={list(class_names)}: each {', '.join(inner)} lies in a module of another "
                "of these classes, and a module is one unit with all that it holds. Name either."
            )
        if missing:
            known = sorted({type(module).__name__ for module in root.modules()})
            raise ConfigError(
                f"units={list(class_names)}: no module of class {', '.join(missing)} in "
                f"{type(root).__name__}. Classes it has: {', '.join(known)}."
            )
        return found
    found = _outermost(root, lambda module: "GradientCheckpointingLayer" in _bases(module))
    return found or _items(root)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is what torch.compile(module) makes around another."""
    return hasattr(module, "_orig_mod")


def _bare(module: nn.Module) -> Any:
    return module._orig_mod if is_wrapper(module) else module


def _bases(module: nn.Module) -> set[str]:
    return {base.__name__ for base in type(_bare(module)).__mro__}


def _outermost(root: nn.Module, wanted, prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in root.named_children():
        path = f"{prefix}{name}"
        if wanted(child):
            found.append((path, child))
        else:
            found.extend(_outermost(child, wanted, f"{path}."))
    return found


def _items(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the items of the outermost lists; lists of lists are opened."""

    def is_list(module: nn.Module) -> bool:
        return type(module) in (nn.ModuleList, nn.Sequential)

    found = []
    lists = [("", root)] if is_list(root) else _outermost(root, is_list)
    while lists:
        path, container = lists.pop(0)
        for name, child in container.named_children():
            child_path = f"{path}.{name}" if path else name
            if is_list(child):
                lists.append((child_path, child))
            elif next(child.parameters(), None) is not None:
                found.append((child_path, child))
    return found


def _rest(path: str, module: nn.Module, chosen: dict[int, str], seen: set[int]) -> None:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if id(child) in seen or id(child) in chosen:
            continue
        seen.add(id(child))
        holds_layers = any(id(inner) in chosen for inner in child.modules())
        own = any(True for _ in _bare(child).parameters(recurse=False))
        runs = type(_bare(child)).forward is not nn.Module.forward
        if own and runs and not holds_layers:
            if sum(_nbytes(param) for param in child.parameters()) >= RESIDENT_BYTES:
                chosen[id(child)] = child_path
        else:
            _rest(child_path, child, chosen, seen)


def _nbytes(param: nn.Parameter) -> int:
    """Count bfloat16 as fp32: what becomes halves of masters is the same units in the next fit."""
    halved = param.dtype == torch.bfloat16
    return param.numel() * (torch.float32.itemsize if halved else param.element_size())
