"""Weights that were built on meta: born in pages, unit by unit, and never whole anywhere."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

import torch
from torch import nn

from mt_lightning.engine.placeholder import placeholder
from mt_lightning.errors import ConfigError
from mt_lightning.pages.layout import memory_order

_UNBORN = "_megatrain_unborn"
"""Attribute of a parameter that holds no values yet: the strides it shall have."""


def replace_meta(root: nn.Module) -> dict[int, tuple[int, ...]]:
    """Give every meta parameter of `root` a placeholder on the CPU; tied ones stay tied.

    Returns:
        By `id` of each parameter that still has to be born, also from an earlier call, the strides
        it shall have.

    Raises:
        ConfigError: A module with meta parameters has no way to initialise them.
    """
    made: dict[int, nn.Parameter] = {}
    orders: dict[int, tuple[int, ...]] = {}
    for path, module in root.named_modules():
        own = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
        if own and initializer(root, path, module) is None:
            raise ConfigError(
                f"{path or type(root).__name__} ({type(module).__name__}) was built on meta "
                f"and its "
                f"parameters {sorted(own)} have no initialiser: give the class a "
                f"reset_parameters() "
                "method, or build it without the meta device."
            )
        for name, param in own.items():
            if id(param) not in made:
                blank = placeholder(tuple(param.shape), param.dtype, torch.device("cpu"))
                twin = nn.Parameter(blank, requires_grad=param.requires_grad)
                vars(twin).update(vars(param))
                made[id(param)] = twin
                setattr(twin, _UNBORN, memory_order(param))
            module._parameters[name] = made[id(param)]
    for param in root.parameters():
        if _UNBORN in vars(param):
            orders[id(param)] = vars(param)[_UNBORN]
    return orders


def mark_born(root: nn.Module) -> None:
    """Note that every parameter of `root` has its values now."""
    for param in root.parameters():
        vars(param).pop(_UNBORN, None)


def initializer(root: nn.Module, path: str, module: nn.Module) -> Callable[[], object] | None:
    """Return what initialises the parameters a module holds itself, None where nothing does.

    That is the nearest `_init_weights(module)` of a module above it (as transformers' models have),
    else its own `reset_parameters`.
    """
    for above in reversed(list(_path(root, path))):
        init = getattr(above, "_init_weights", None)
        if callable(init):
            return lambda: init(module)
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def _path(root: nn.Module, path: str) -> Iterator[nn.Module]:
    yield root
    module = root
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        yield module


def materialise_buffers(root: nn.Module) -> None:
    """Allocate meta buffers (they are small) and let their modules fill them.

    Raises:
        ConfigError: A module has no way to fill a buffer.
    """
    for path, module in root.named_modules():
        lost = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if not lost:
            continue
        for name in lost:
            buffer = module._buffers[name]
            assert buffer is not None
            nan = float("nan") if buffer.dtype.is_floating_point else 0
            module._buffers[name] = torch.full(buffer.shape, nan, dtype=buffer.dtype)
        init = initializer(root, path, module)
        if init is not None and next(module.parameters(recurse=False), None) is None:
            init()
        left = [
            n
            for n in lost
            if (b := module._buffers[n]) is not None
            and b.is_floating_point()
            and bool(b.isnan().any())
        ]
        if left and next(module.parameters(recurse=False), None) is None:
            raise ConfigError(
                f"{path} ({type(module).__name__}) was built on meta and nothing fills its buffers "
                f"{left}: give the class a reset_parameters() method, or build it without meta."
            )


def give_birth(
    root: nn.Module, modules: Iterable[tuple[str, nn.Module]], unborn: Container[int]
) -> None:
    """Initialise every module among `modules` that holds an unborn parameter."""
    for path, module in modules:
        if any(id(param) in unborn for param in module.parameters(recurse=False)):
            init = initializer(root, path, module)
            assert init is not None
            for param in module.parameters(recurse=False):
                # transformers skips what was loaded from a checkpoint; these were not.
                vars(param).pop("_is_hf_initialized", None)
            vars(module).pop("_is_hf_initialized", None)
            with torch.no_grad():
                init()
