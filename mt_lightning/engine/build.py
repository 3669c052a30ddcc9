"""Sort a model's parameters into pages and lay out the optimizer state beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mt_lightning.engine.units import Unit
from mt_lightning.errors import ConfigError
from mt_lightning.optim.shadow import check_separable, probe_state
from mt_lightning.optim.support import check_supported, is_elementwise
from mt_lightning.pages.layout import PageLayout, fingerprint, lay_out, memory_order
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.pages.state import StateLayout, sliced_state, whole_state
from mt_lightning.pages.table import PageTable, new_page

_PROBE_NUMEL = 3


@dataclass
class Members:
    """The live parameters behind one page's layout, in its order."""

    params: list[nn.Parameter]
    groups: list[int]


@dataclass
class Build:
    """A model sorted into pages.

    Attributes:
        units: The units, each knowing its pages.
        table: The page table.
        members: For each page, its parameters.
        resident: Indices of the pages that no unit holds.
    """

    units: list[Unit]
    table: PageTable
    members: list[Members]
    resident: list[int]


def build_pages(
    root: nn.Module,
    units: list[Unit],
    optimizers: list[torch.optim.Optimizer],
    orders: dict[int, tuple[int, ...]],
    slice_bytes: int,
) -> Build:
    """Lay out every parameter of `root`.

    Args:
        root: The model.
        units: Its units; their `pages` are filled.
        optimizers: The user's optimizers, empty for validation and prediction.
        orders: Strides by `id` of a parameter, for parameters that hold placeholders now.
        slice_bytes: Length of an update slice in the weight plane.
    """
    owner = _optimizer_of(root, optimizers)
    holders = _unit_sets(root, units)
    sorted_params: dict[tuple[tuple[int, ...], int | None], list[tuple[str, nn.Parameter]]] = {}
    for name, param in root.named_parameters():
        place = owner.get(id(param))
        key = (holders[id(param)], place[0] if place else None)
        sorted_params.setdefault(key, []).append((name, param))

    layouts, members = [], []
    for unit in units:
        unit.pages.clear()
    resident = []
    for (holding, optimizer), named in sorted_params.items():
        index = len(layouts)
        described: list[tuple[str, torch.Tensor, tuple[int, ...]]] = [
            (n, p, orders.get(id(p)) or memory_order(p)) for n, p in named
        ]
        layouts.append(lay_out(index, tuple(units[u].name for u in holding), optimizer, described))
        members.append(
            Members([p for _, p in named], [owner.get(id(p), (0, 0))[1] for _, p in named])
        )
        for u in holding:
            units[u].pages.append(index)
        if not holding:
            resident.append(index)
    probes: dict[Any, dict[str, Any]] = {}
    pages = [
        new_page(
            layout, _state_layout(layout, members[layout.index], optimizers, slice_bytes, probes)
        )
        for layout in layouts
    ]
    return Build(units, PageTable(pages, fingerprint(layouts)), members, resident)


def _optimizer_of(
    root: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[int, tuple[int, int]]:
    names = {id(param): name for name, param in root.named_parameters()}
    owner: dict[int, tuple[int, int]] = {}
    for index, optimizer in enumerate(optimizers):
        check_supported(optimizer)
        for group_index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise ConfigError(
                        f"{type(optimizer).__name__} trains a tensor of shape {tuple(param.shape)} "
                        "that is not a parameter of the module; strategy='megatrain' pages module "
                        "parameters only. Register it as an nn.Parameter."
                    )
                if id(param) in owner:
                    raise ConfigError(
                        f"{names[id(param)]} is in two optimizers; strategy='megatrain' needs each "
                        "parameter in one. Remove it from one in configure_optimizers."
                    )
                owner[id(param)] = (index, group_index)
    return owner


def _unit_sets(root: nn.Module, units: list[Unit]) -> dict[int, tuple[int, ...]]:
    """Map each parameter to the units that hold it; to none when a module outside does too."""
    inside: set[int] = set()
    holders: dict[int, list[int]] = {}
    for unit in units:
        inside.update(id(module) for module in unit.module.modules())
        for param in unit.module.parameters():
            holders.setdefault(id(param), []).append(unit.index)
    for module in root.modules():
        if id(module) not in inside:
            for param in module.parameters(recurse=False):
                holders[id(param)] = []
    return {key: tuple(value) for key, value in holders.items()}


def _state_layout(
    layout: PageLayout,
    members: Members,
    optimizers: list[torch.optim.Optimizer],
    slice_bytes: int,
    probes: dict[Any, dict[str, Any]],
) -> StateLayout:
    if layout.optimizer is None:
        return StateLayout(True, (), (), 0)
    optimizer = optimizers[layout.optimizer]
    sliced = is_elementwise(optimizer) and all(spec.dense for spec in layout.params)
    found: list[dict[str, torch.Tensor]] = []
    for param, group, spec in zip(members.params, members.groups, layout.params, strict=True):
        given = optimizer.state.get(param)
        if given:
            state = given
        else:
            shape = (_PROBE_NUMEL,) if sliced else spec.shape
            key = (layout.optimizer, group, shape, spec.dtype)
            if key not in probes:
                probes[key] = {
                    name: value.to("meta")
                    if isinstance(value, torch.Tensor) and value.dim()
                    else value
                    for name, value in probe_state(optimizer, group, shape, spec.dtype).items()
                }
                if not type(optimizer).__module__.startswith("torch.optim."):
                    check_separable(optimizer, group, len(spec.shape))
            state = probes[key]
        found.append(
            {
                k: v
                for k, v in state.items()
                if isinstance(v, torch.Tensor) and v.dim() and v.numel()
            }
        )
    if sliced and all(
        value.numel() in (spec.numel, _PROBE_NUMEL) and value.dtype == spec.dtype
        for spec, state in zip(layout.params, found, strict=True)
        for value in state.values()
    ):
        return sliced_state(layout, [tuple(state) for state in found], slice_bytes)
    shapes = [{k: (tuple(v.shape), v.dtype) for k, v in state.items()} for state in found]
    if sliced:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps state of another shape or dtype than its parameters "
            f"in page {layout.key}, which slices cannot follow."
        )
    return whole_state(layout, shapes, BLOCK_BYTES)
