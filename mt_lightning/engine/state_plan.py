"""Find out what state an optimizer keeps, and lay out the state plane of each page by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mt_lightning.errors import ConfigError
from mt_lightning.optim.codec import StateCodec
from mt_lightning.optim.masters import REST_DTYPE
from mt_lightning.optim.shadow import check_separable, probe_state
from mt_lightning.optim.support import is_elementwise
from mt_lightning.pages.layout import PageLayout, ParamSpec
from mt_lightning.pages.packed import Packing, packed_state
from mt_lightning.pages.sizes import ALIGN_BYTES, BLOCK_BYTES
from mt_lightning.pages.state import MASTER_REST, StateLayout, sliced_state, whole_state

_PROBE_NUMEL = 3
_OWN_CLASSES = "torch.optim"
"""Those of torch: what state they keep does not depend on how long a dimension is."""


class StatePlanner:
    """Lays out state planes; what a class keeps is found by one trial step per kind of parameter.

    Pages of equal parameters, as the layers of a model have, share one layout: a model of a million
    chunks would take minutes otherwise.

    Args:
        optimizers: The user's optimizers.
        codecs: How the state of each is kept.
        slice_bytes: Length of an update slice in the weight plane, were it of fp32.
        masters: Whether weights are halves of fp32 masters, which the optimizers step.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        codecs: list[StateCodec],
        slice_bytes: int,
        *,
        masters: bool = False,
    ) -> None:
        self._optimizers = optimizers
        self._codecs = codecs
        self._masters = masters
        # As many elements as without masters.
        self._slice_bytes = max(ALIGN_BYTES, slice_bytes // 2) if masters else slice_bytes
        self._probes: dict[Any, dict[str, Any]] = {}
        self._made: dict[Any, StateLayout] = {}

    def lay_out(
        self,
        layout: PageLayout,
        params: list[nn.Parameter],
        groups: list[int],
        packings: list[Packing],
        keeps_rest: list[bool],
    ) -> StateLayout:
        """Lay out the state plane of one page.

        Args:
            layout: The page.
            params: Its parameters, in its order.
            groups: The param group of each.
            packings: How the state of each is packed; empty where it is not.
            keeps_rest: Whether there are fp32 masters of each, whose rests are kept.
        """
        if layout.optimizer is None:
            return self._rests_alone(layout, keeps_rest)
        if packings:
            key = (_places(layout), tuple(packings))
            if key not in self._made:
                self._made[key] = packed_state(layout, packings, self._slice_bytes)
            return self._made[key]
        optimizer, codec = self._optimizers[layout.optimizer], self._codecs[layout.optimizer]
        sliced = is_elementwise(optimizer) and all(spec.dense for spec in layout.params)
        found = self._found(layout, optimizer, params, groups, sliced)
        for spec, state, keeps in zip(layout.params, found, keeps_rest, strict=True):
            if keeps:
                state[MASTER_REST] = torch.empty(spec.shape, dtype=REST_DTYPE, device="meta")
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

    def _rests_alone(self, layout: PageLayout, keeps_rest: list[bool]) -> StateLayout:
        if not any(keeps_rest):
            return StateLayout(True, (), (), 0)
        key = (_places(layout), tuple(keeps_rest))
        if key not in self._made:
            if all(spec.dense for spec in layout.params):
                kept = [{MASTER_REST: REST_DTYPE} if keeps else {} for keeps in keeps_rest]
                made = sliced_state(layout, kept, self._slice_bytes)
            else:
                pairs = zip(layout.params, keeps_rest, strict=True)
                rests = [{MASTER_REST: (s.shape, REST_DTYPE)} if k else {} for s, k in pairs]
                made = whole_state(layout, rests, BLOCK_BYTES)
            self._made[key] = made
        return self._made[key]

    def _dtype(self, spec: ParamSpec) -> torch.dtype:
        """Return the dtype of what the optimizer steps."""
        return torch.float32 if self._masters and spec.dtype.is_floating_point else spec.dtype

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
            if given and given.keys() != {MASTER_REST}:
                state = {k: self._as_stepped(v, spec) for k, v in given.items()}
            elif not spec.has_gradient:
                state = {}  # the optimizer passes it over
            else:
                shape = (_PROBE_NUMEL,) if sliced else spec.shape
                dtype = self._dtype(spec)
                key = (layout.optimizer, group, shape, dtype)
                if key not in self._probes:
                    if f"{type(optimizer).__module__}.".startswith(f"{_OWN_CLASSES}."):
                        self._probes[key] = probe_small(optimizer, group, shape, dtype)
                    else:
                        state = probe_state(optimizer, group, shape, dtype)
                        self._probes[key] = _on_meta(state, {})
                        check_separable(optimizer, group, len(spec.shape))
                state = self._probes[key]
            found.append(
                {
                    k: v
                    for k, v in state.items()
                    if isinstance(v, torch.Tensor) and v.dim() and v.numel() and k != MASTER_REST
                }
            )
        return found

    def _as_stepped(self, value: Any, spec: ParamSpec) -> Any:
        """Return state in the dtype it has once a master was stepped; its values do not matter."""
        halves = self._dtype(spec) != spec.dtype
        if halves and isinstance(value, torch.Tensor) and value.dtype == spec.dtype:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=torch.float32, device="meta"
            )
        return value

    def _plain(
        self,
        layout: PageLayout,
        optimizer: torch.optim.Optimizer,
        found: list[dict[str, torch.Tensor]],
        sliced: bool,
    ) -> StateLayout:
        if sliced and all(
            value.numel() in (spec.numel, _PROBE_NUMEL) and value.dtype == self._dtype(spec)
            for spec, state in zip(layout.params, found, strict=True)
            for key, value in state.items()
            if key != MASTER_REST
        ):
            kept = [{key: value.dtype for key, value in state.items()} for state in found]
            return sliced_state(layout, kept, self._slice_bytes)
        shapes = [{k: (tuple(v.shape), v.dtype) for k, v in state.items()} for state in found]
        if sliced:
            raise ConfigError(
                f"{type(optimizer).__name__} keeps state of another shape or dtype than its "
                f"parameters in page {layout.key}, which slices cannot follow."
            )
        return whole_state(layout, shapes, BLOCK_BYTES)


def probe_small(
    optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Find what state a class of torch keeps for a parameter, on one with short dimensions.

    A trial step on the embedding of a large model would take gigabytes and minutes. Each dimension
    has a length of its own in the trial, by which it is found again in the state.
    """
    small = tuple(_PROBE_NUMEL + place if length > 1 else 1 for place, length in enumerate(shape))
    lengths = dict(zip(small, shape, strict=True))
    return _on_meta(probe_state(optimizer, group, small, dtype), lengths)


def _on_meta(state: dict[str, Any], lengths: dict[int, int]) -> dict[str, Any]:
    """Return state without its values; `lengths` says how long dimensions are in truth."""
    return {
        name: torch.empty(
            [lengths.get(length, length) for length in value.shape],
            dtype=value.dtype,
            device="meta",
        )
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in state.items()
    }


def _places(layout: PageLayout) -> tuple[Any, ...]:
    """Return all of a page that its state plane depends on: names do not matter."""
    return tuple((p.shape, p.stride, p.dtype, p.offset) for p in layout.params)
