"""Optimizer state in torch's own form: given out as mapped tensors, taken in page by page."""

from __future__ import annotations

from typing import Any

import torch

from mt_lightning.engine.build import Build
from mt_lightning.engine.masters.halves import fill_rest, ordered
from mt_lightning.engine.plain import PlainState
from mt_lightning.engine.state_chunks import StateChunks
from mt_lightning.engine.trained import Trained
from mt_lightning.errors import ConfigError
from mt_lightning.pages.layout import ParamSpec
from mt_lightning.pages.packed import PACKED_KEY
from mt_lightning.pages.state import (
    MASTER_REST,
    Chunk,
    Segment,
    StateLayout,
    StatePart,
    StateTensor,
)
from mt_lightning.pages.table import Page, ParamState
from mt_lightning.tiers.arena import Frame

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DESCRIPTION = ("shape", "stride", "format")
_WAY_OUT = (
    "Set optimizer_compression to what wrote it, or convert the checkpoint: "
    "megatrain export IN OUT --optimizer FORM."
)


def export_state(build: Build, trained: Trained, plain: PlainState) -> dict[int, dict[str, Any]]:
    """Return the state by position of the parameter; tensors are private views of mapped files."""
    mappings = {
        page.index: plain.map(page, trained.codec)
        for page in trained.pages
        if page.state.slot is not None
    }
    result: dict[int, dict[str, Any]] = {}
    for position, (index, param) in enumerate(trained.order):
        page = build.table[index]
        small = page.small[param]
        if small.empty:
            continue
        state = {
            k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in small.values.items()
        }
        for tensor in page.state_layout.tensors:
            if tensor.param == param and tensor.key in small.present:
                flat = mappings[index].tensor(tensor.offset, tensor.nbytes).view(tensor.dtype)
                state[tensor.key] = flat.as_strided(tensor.shape, tensor.stride)
        if page.state_layout.formats and PACKED_KEY in state:
            # As CompressedAdamW keeps it: records alone do not tell what they are the state of.
            spec = page.layout.params[param]
            format = page.state_layout.formats[param]
            state.update(shape=spec.shape, stride=spec.stride, format=format)
        result[position] = state
    return result


class StateImporter:
    """Writes optimizer state to pages: from a checkpoint, or from the optimizer itself."""

    def __init__(self, chunks: StateChunks) -> None:
        self._chunks = chunks

    def load(self, page: Page, states: list[dict[str, Any]]) -> set[str]:
        """Replace the state of one page; rests of masters stay where none are given.

        Args:
            page: The page.
            states: For each of its parameters, the state; empty where there is none.

        Returns:
            The files written.

        Raises:
            ConfigError: The state does not fit what the optimizer keeps.
        """
        keys: list[set[str]] = [set() for _ in states]
        for tensor in page.state_layout.tensors:
            keys[tensor.param].add(tensor.key)
        small = []
        layout = page.state_layout
        for i, (spec, state) in enumerate(zip(page.layout.params, states, strict=True)):
            known = keys[i]
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
            # The moments of a parameter without dimensions have none either.
            large = {k for k, v in tensors.items() if v.dim() or k in (*known, *_MOMENTS)}
            _check_keys(spec, large, known, layout)
            values = {k: v for k, v in state.items() if k not in large}
            if layout.formats and state.keys() - {MASTER_REST}:
                _check_packed(spec, state, layout.tensors[i], layout.formats[i])
                values = {k: v for k, v in values.items() if k not in _DESCRIPTION}
            values = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            large |= known & {MASTER_REST}
            small.append(ParamState(tuple(sorted(large)), values))
        touched = set()
        if page.state.nbytes and any(state.present for state in small):

            def change(chunk: Chunk, frame: Frame) -> None:
                for segment in chunk.segments:
                    spec = page.layout.params[segment.param]
                    _fill(frame, spec, segment, states[segment.param], layout)

            touched.add(self._chunks.rewrite(page, change, keeps=layout.has_masters))
        page.small = small
        return touched


def _check_keys(spec: ParamSpec, found: set[str], known: set[str], layout: StateLayout) -> None:
    """Raise ConfigError when a parameter's state has tensors that the run does not keep."""
    if found <= known:
        return
    if MASTER_REST in found - known:
        raise ConfigError(
            f"the optimizer state of {spec.name} holds the lower halves of fp32 masters, and this "
            "run has none: it was saved with precision='bf16-true'. Set that, or go on from its "
            "weights alone, which mt.save_masters and megatrain export --masters write in float32."
        )
    if layout.formats or PACKED_KEY in found:
        raise ConfigError(
            f"the optimizer state of {spec.name} is {_form(found)}, and this run keeps it "
            f"{_form(known)}: it is never converted silently. {_WAY_OUT}"
        )
    raise ConfigError(
        f"the optimizer state of {spec.name} holds {sorted(found - known)}, which the optimizer of "
        "this run does not keep; use the optimizer that wrote it."
    )


def _check_packed(spec: ParamSpec, state: dict[str, Any], tensor: StateTensor, format: str) -> None:
    """Raise ConfigError when packed state is that of another parameter or format."""
    found = state.get("format")
    if found != format:
        raise ConfigError(
            f"the optimizer state of {spec.name} is in format {found!r}, and this run keeps it in "
            f"{format!r}: it is never converted silently. {_WAY_OUT}"
        )
    shape, stride = tuple(state["shape"]), tuple(state["stride"])
    packed = state[PACKED_KEY]
    # The stride of a dimension of one element means nothing.
    if (
        shape != spec.shape
        or any(a != b for a, b, n in zip(stride, spec.stride, shape, strict=True) if n > 1)
        or (packed.dtype, tuple(packed.shape)) != (tensor.dtype, tensor.shape)
    ):
        raise ConfigError(
            f"the packed optimizer state of {spec.name} is for shape {shape} and strides {stride}, "
            f"and the parameter has {spec.shape} and {spec.stride}; it belongs to another model."
        )


def _form(keys: set[str]) -> str:
    return "packed" if PACKED_KEY in keys else f"plain ({', '.join(sorted(keys))})"


def _fill(
    frame: Frame, spec: ParamSpec, segment: Segment, state: dict[str, Any], layout: StateLayout
) -> None:
    for part in segment.parts:
        value = state.get(part.key)
        if part.key == MASTER_REST:
            if value is not None:
                _check_shape(value, spec.shape, spec)
                fill_rest(frame, spec, segment, part, value)
        elif value is None:
            part.of(frame.tensor).zero_()
        elif layout.formats:
            part.of(frame.tensor).copy_(value[part.first : part.first + part.nbytes])
        else:
            part.of(frame.tensor).copy_(_flat(value, spec, segment, part))


def _check_shape(value: torch.Tensor, expected: tuple[int, ...], spec: ParamSpec) -> None:
    if tuple(value.shape) != tuple(expected):
        raise ConfigError(
            f"the optimizer state of {spec.name} has a tensor of shape {tuple(value.shape)} where "
            f"{tuple(expected)} is expected; it belongs to another model."
        )


def _flat(value: torch.Tensor, spec: ParamSpec, segment: Segment, part: StatePart) -> torch.Tensor:
    """Return what a segment keeps of `value`, 1-D and in the order of the page."""
    expected = spec.shape if part.shape is None else part.shape
    _check_shape(value, expected, spec)
    flat = ordered(value, spec) if tuple(expected) == spec.shape else value.reshape(-1)
    return flat[segment.start : segment.stop] if part.shape is None else flat
