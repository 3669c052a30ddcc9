"""What cannot be paged under a plain loop is refused before anything is done to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mt_lightning.errors import ConfigError
from mt_lightning.optim.support import check_supported
from mt_lightning.paging.open_handles import paged_parameters

_WRAPPERS = {
    "DistributedDataParallel": "it copies gradients between processes",
    "DataParallel": "it copies the model to several devices",
    "FullyShardedDataParallel": "it moves parameters itself",
    "ScriptModule": "its code cannot be stopped between two layers",
}

_NOWHERE = ("cpu", "meta")
"""Where parameters may be that are trained on another device."""


def check_optimizers(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return the optimizers as a list.

    Raises:
        ConfigError: Something is no optimizer, or one that cannot be paged.
    """
    if given is None:
        return []
    optimizers: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    for optimizer in optimizers:
        if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} wraps {type(optimizer.optimizer).__name__}: call "
                "mt.page with the optimizer inside, before accelerator.prepare or the like."
            )
        check_supported(optimizer)
    return optimizers


def device_of(model: nn.Module, asked: str | torch.device | None) -> torch.device:
    """Return where a model computes, with its index: what was asked for, or where it is.

    Raises:
        ConfigError: Its parameters are on several devices, or on another one than asked for.
    """
    found = sorted({str(p.device) for p in model.parameters() if p.device.type not in _NOWHERE})
    wanted = torch.device(asked) if asked is not None else None
    if wanted is None:
        wanted = torch.device(found[0] if found else "cpu")
    if wanted.type != "cpu" and wanted.index is None:
        wanted = torch.device(wanted.type, torch.get_device_module(wanted).current_device())
    if [name for name in found if name != str(wanted)]:
        raise ConfigError(
            f"the model has parameters on {', '.join(found)}, and mt.page computes on one device, "
            f"{wanted}. Move the model there or to the CPU, or give device=."
        )
    return wanted


def check_model(model: Any, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a model that is no plain module, or that something else has in its hands.

    Raises:
        ConfigError: It says what, and the way out.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"mt.page takes a torch.nn.Module, not {type(model).__name__}.")
    for path, module in model.named_modules():
        name = path or "the model"
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS:
                raise ConfigError(
                    f"{name} is a {type(module).__name__}, which cannot be paged: "
                    f"{_WRAPPERS[base.__name__]}. Give mt.page the module inside."
                )
        if "_hf_hook" in vars(module):
            raise ConfigError(
                f"{name} was placed by accelerate (device_map=...), which moves weights itself. "
                "Load the model without device_map."
            )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        num_processes = torch.distributed.get_world_size()
        if num_processes > 1:
            raise ConfigError(
                f"mt.page runs in one process, and torch.distributed has {num_processes}. Start "
                "the script without a launcher."
            )
    paged = paged_parameters()
    trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    for name, param in model.named_parameters():
        if id(param) in paged:
            raise ConfigError(f"{name} is on pages already; close() the handle that holds it.")
        if param.grad is not None:
            raise ConfigError(
                f"{name} has a gradient already, which no page holds. Call optimizer.zero_grad() "
                "before mt.page."
            )
    if optimizers and not trained:
        raise ConfigError(
            "the optimizer has no parameters; give mt.page one that trains the model."
        )
