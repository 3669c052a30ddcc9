"""Sort a model's parameters into pages and lay out the optimizer state beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mt_lightning.engine.compiled import refuse_compiled
from mt_lightning.engine.state_plan import StatePlanner
from mt_lightning.engine.units import Unit, resident_modules
from mt_lightning.errors import ConfigError
from mt_lightning.optim.codec import StateCodec
from mt_lightning.optim.support import check_supported
from mt_lightning.pages.layout import fingerprint, lay_out, memory_order, strided_span
from mt_lightning.pages.packed import Packing
from mt_lightning.pages.table import PageTable, new_page


@dataclass
class Members:
    """The live parameters behind one page's layout, in its order."""

    params: list[nn.Parameter]
    groups: list[int]
    """Param group of each, in its optimizer."""
    positions: list[int]
    """Position of each among all parameters of its optimizer."""
    packings: list[Packing]
    """How the state of each is packed; empty where it is not."""


@dataclass
class Build:
    """A model sorted into pages.

    Attributes:
        units: The units, each knowing its pages.
        table: The page table.
        members: For each page, its parameters.
        resident: Indices of the pages that no unit holds.
        codecs: For each optimizer, how its state is kept.
    """

    units: list[Unit]
    table: PageTable
    members: list[Members]
    resident: list[int]
    codecs: list[StateCodec]

    def knows(self, root: nn.Module) -> bool:
        """Return whether `root` has exactly these parameters, of the same shapes and dtypes."""
        specs = {
            id(param): spec
            for page in self.table
            for param, spec in zip(self.members[page.index].params, page.layout.params, strict=True)
        }
        now = {id(param): param for param in root.parameters()}
        return specs.keys() == now.keys() and all(
            spec.shape == tuple(now[key].shape) and spec.dtype == now[key].dtype
            for key, spec in specs.items()
        )


@dataclass(frozen=True)
class _Place:
    """Where a parameter stands among the optimizers."""

    optimizer: int | None = None
    group: int = 0
    position: int = 0


@dataclass
class _Named:
    """A parameter on its way to a page."""

    name: str
    param: nn.Parameter
    place: _Place
    stride: tuple[int, ...]
    packing: Packing | None = None


def build_pages(
    root: nn.Module,
    units: list[Unit],
    optimizers: list[torch.optim.Optimizer],
    orders: dict[int, tuple[int, ...]],
    slice_bytes: int,
    codecs: list[StateCodec],
    has_rest: Callable[[nn.Parameter], bool] | None = None,
    *,
    rounds: bool = False,
    resident: Sequence[str] | None = None,
) -> Build:
    """Lay out every parameter of `root`.

    Args:
        root: The model.
        units: Its units; their `pages` are filled.
        optimizers: The user's optimizers, empty for validation and prediction.
        orders: Strides by `id` of a parameter, for parameters that hold placeholders now.
        slice_bytes: Length of an update slice in the weight plane.
        codecs: How the state of each optimizer is kept.
        has_rest: Tells of a parameter that no optimizer trains whether its values have more than
            bfloat16 holds; None where weights are not halves of fp32 masters.
        rounds: Whether fp32 gradients wait as bfloat16.
        resident: Names of modules whose parameters no unit holds.

    Raises:
        ConfigError: Code was compiled across units, or a parameter cannot be laid out.
    """
    refuse_compiled(root, units)
    masters = has_rest is not None
    owner = _optimizer_of(root, optimizers)
    holders = _unit_sets(root, units, resident_modules(root, resident))
    sorted_params: dict[tuple[tuple[int, ...], int | None], list[_Named]] = {}
    for name, param in root.named_parameters():
        place = owner.get(id(param), _Place())
        named = _Named(name, param, place, orders.get(id(param)) or memory_order(param))
        if place.optimizer is not None:
            group = optimizers[place.optimizer].param_groups[place.group]
            named.packing = codecs[place.optimizer].packing(group, param.shape, named.stride)
        sorted_params.setdefault((holders[id(param)], place.optimizer), []).append(named)

    layouts, members, unheld = [], [], []
    for unit in units:
        unit.pages.clear()
    for (holding, optimizer), named in sorted_params.items():
        index = len(layouts)
        packings = [n.packing for n in named if n.packing is not None]
        if masters:
            _check_halves(named)
        if packings:
            _check_packable(named, masters=masters)
        layouts.append(
            lay_out(
                index,
                tuple(units[u].name for u in holding),
                optimizer,
                [(n.name, n.param, n.stride) for n in named],
                packed=bool(packings),
                halves=masters,
                rounds=rounds,
            )
        )
        members.append(
            Members(
                [n.param for n in named],
                [n.place.group for n in named],
                [n.place.position for n in named],
                packings,
            )
        )
        for u in holding:
            units[u].pages.append(index)
        if not holding:
            unheld.append(index)
    planner = StatePlanner(optimizers, codecs, slice_bytes, masters=masters)
    pages = []
    for layout, mine in zip(layouts, members, strict=True):
        trained = layout.optimizer is not None
        keeps = [
            has_rest is not None and p.is_floating_point() and (trained or has_rest(p))
            for p in mine.params
        ]
        state = planner.lay_out(layout, mine.params, mine.groups, mine.packings, keeps)
        pages.append(new_page(layout, state))
    formats = [page.state_layout.formats for page in pages]
    return Build(units, PageTable(pages, fingerprint(layouts, formats)), members, unheld, codecs)


def _optimizer_of(root: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[int, _Place]:
    names = {id(param): name for name, param in root.named_parameters()}
    owner: dict[int, _Place] = {}
    for index, optimizer in enumerate(optimizers):
        check_supported(optimizer)
        position = 0
        for group_index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise ConfigError(
                        f"{type(optimizer).__name__} trains a tensor of shape {tuple(param.shape)} "
                        "that is not a parameter of the module; only those are paged. Register it "
                        "as an nn.Parameter."
                    )
                if id(param) in owner:
                    raise ConfigError(
                        f"{names[id(param)]} is in two optimizers; paging needs each "
                        "parameter in one. Remove it from one in configure_optimizers."
                    )
                owner[id(param)] = _Place(index, group_index, position)
                position += 1
    return owner


def _unit_sets(
    root: nn.Module, units: list[Unit], resident: set[int]
) -> dict[int, tuple[int, ...]]:
    """Map each parameter to the units that hold it; to none when another module does too."""
    inside: set[int] = set()
    holders: dict[int, list[int]] = {}
    for unit in units:
        inside.update(id(module) for module in unit.module.modules())
        for param in unit.module.parameters():
            holders.setdefault(id(param), []).append(unit.index)
    for module in root.modules():
        if id(module) not in inside or id(module) in resident:
            for param in module.parameters(recurse=False):
                holders[id(param)] = []
    return {key: tuple(value) for key, value in holders.items()}


def _check_halves(named: list[_Named]) -> None:
    for n in named:
        if n.param.is_floating_point() and n.param.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"{n.name} is {n.param.dtype}; precision='bf16-true' keeps float32 masters of "
                "float32 and bfloat16 parameters. Make it one of these, as by model.float()."
            )


def _check_packable(named: list[_Named], *, masters: bool) -> None:
    for n in named:
        if n.param.dtype != torch.float32 and not masters:
            raise ConfigError(
                f"{n.name} is {n.param.dtype}; packed optimizer state is for float32 parameters. "
                "Set optimizer_compression=False or 'lossless', keep the parameter in float32, or "
                "set precision='bf16-true', which keeps float32 masters."
            )
        if strided_span(tuple(n.param.shape), n.stride) != n.param.numel():
            raise ConfigError(
                f"{n.name} has gaps in memory (strides {n.stride}), which packed optimizer state "
                "cannot follow. Make it contiguous() before training."
            )
