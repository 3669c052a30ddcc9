"""Find out what state an optimizer keeps, and lay out the state plane of each page by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mt_lightning.errors import ConfigError
from mt_lightning.optim.codec import StateCodec
from mt_lightning.optim.shadow import check_separable, probe_state
from mt_lightning.optim.support import is_elementwise
from mt_lightning.pages.layout import PageLayout
from mt_lightning.pages.packed import Packing, packed_state
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.pages.state import StateLayout, sliced_state, whole_state

_PROBE_NUMEL = 3


class StatePlanner:
    """Lays out state planes; what a class keeps is found by one trial step per kind of parameter.

    Pages of equal parameters, as the layers of a model have, share one layout: a model of a million
    chunks would take minutes otherwise.

    Args:
        optimizers: The user's optimizers.
        codecs: How the state of each is kept.
        slice_bytes: Length of an update slice in the weight plane.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        codecs: list[StateCodec],
        slice_bytes: int,
    ) -> None:
        self._optimizers = optimizers
        self._codecs = codecs
        self._slice_bytes = slice_bytes
        self._probes: dict[Any, dict[str, Any]] = {}
        self._made: dict[Any, StateLayout] = {}

    def lay_out(
        self,
        layout: PageLayout,
        params: list[nn.Parameter],
        groups: list[int],
        packings: list[Packing],
    ) -> StateLayout:
        """Lay out the state plane of one page.

        Args:
            layout: The page.
            params: Its parameters, in its order.
            groups: The param group of each.
            packings: How the state of each is packed; empty where it is not.
        """
        if layout.optimizer is None:
            return StateLayout(True, (), (), 0)
        if packings:
            key = (_places(layout), tuple(packings))
            if key not in self._made:
                self._made[key] = packed_state(layout, packings, self._slice_bytes)
            return self._made[key]
        optimizer, codec = self._optimizers[layout.optimizer], self._codecs[layout.optimizer]
        sliced = is_elementwise(optimizer) and all(spec.dense for spec in layout.params)
        found = self._found(layout, optimizer, params, groups, sliced)
        kept = tuple(
            tuple((name, value.shape, value.dtype) for name, value in state.items())
            for state in found
        )
        key = (_places(layout), layout.optimizer, kept)
        if key not in self._made:
            state = self._plain(layout, optimizer, found, sliced)
            coded = codec.coded and state.plain_bytes
            self._made[key] = state.coded(codec.longest) if coded else state
        return self._made[key]

    def _found(
        self,
        layout: PageLayout,
        optimizer: torch.optim.Optimizer,
        params: list[nn.Parameter],
        groups: list[int],
        sliced: bool,
    ) -> list[dict[str, torch.Tensor]]:
        """Return the tensors that the optimizer keeps for each parameter."""
        found: list[dict[str, torch.Tensor]] = []
        for param, group, spec in zip(params, groups, layout.params, strict=True):
            # Without dimensions a moment cannot be told from a step count.
            given = optimizer.state.get(param) if spec.shape else None
            if given:
                state = given
            else:
                shape = (_PROBE_NUMEL,) if sliced else spec.shape
                key = (layout.optimizer, group, shape, spec.dtype)
                if key not in self._probes:
                    self._probes[key] = {
                        name: value.to("meta")
                        if isinstance(value, torch.Tensor) and value.dim()
                        else value
                        for name, value in probe_state(optimizer, group, shape, spec.dtype).items()
                    }
                    if not type(optimizer).__module__.startswith("torch.optim."):
                        check_separable(optimizer, group, len(spec.shape))
                state = self._probes[key]
            found.append(
                {
                    k: v
                    for k, v in state.items()
                    if isinstance(v, torch.Tensor) and v.dim() and v.numel()
                }
            )
        return found

    def _plain(
        self,
        layout: PageLayout,
        optimizer: torch.optim.Optimizer,
        found: list[dict[str, torch.Tensor]],
        sliced: bool,
    ) -> StateLayout:
        if sliced and all(
            value.numel() in (spec.numel, _PROBE_NUMEL) and value.dtype == spec.dtype
            for spec, state in zip(layout.params, found, strict=True)
            for value in state.values()
        ):
            return sliced_state(layout, [tuple(state) for state in found], self._slice_bytes)
        shapes = [{k: (tuple(v.shape), v.dtype) for k, v in state.items()} for state in found]
        if sliced:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps state of another shape or dtype than its "
                f"parameters in page {layout.key}, which slices cannot follow."
            )
        return whole_state(layout, shapes, BLOCK_BYTES)


def _places(layout: PageLayout) -> tuple[Any, ...]:
    """Return all of a page that its state plane depends on: names do not matter."""
    return tuple((p.shape, p.stride, p.dtype, p.offset) for p in layout.params)
