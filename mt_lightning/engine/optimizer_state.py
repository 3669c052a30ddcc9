"""Optimizer state in torch's own form: given out as mapped tensors, taken in page by page."""

from __future__ import annotations

from typing import Any

import torch

from mt_lightning.engine.build import Build
from mt_lightning.engine.spill import Ring
from mt_lightning.engine.trained import Trained
from mt_lightning.errors import ConfigError
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pages.layout import ParamSpec
from mt_lightning.pages.state import Segment
from mt_lightning.pages.table import Page, ParamState
from mt_lightning.tiers.arena import Arena, Frame
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.store import Store


def export_state(build: Build, trained: Trained, store: Store) -> dict[int, dict[str, Any]]:
    """Return the state by position of the parameter; tensors are private views of mapped files."""
    mappings = {
        page.index: store.map_private(page.state.file, 0, page.state.nbytes)
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
        result[position] = state
    return result


class StateImporter:
    """Writes optimizer state to pages: from a checkpoint, or from the optimizer itself."""

    def __init__(
        self, store: Store, io: IOQueue, pool: WeightPool, arena: Arena, ring: Ring
    ) -> None:
        self._store = store
        self._ring = ring
        self._io = io
        self._pool = pool
        self._arena = arena

    def load(self, page: Page, states: list[dict[str, Any]]) -> set[str]:
        """Replace the state of one page.

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
        for spec, state, known in zip(page.layout.params, states, keys, strict=True):
            large = {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
            if large - known:
                raise ConfigError(
                    f"the optimizer state of {spec.name} holds {sorted(large - known)}, which the "
                    "optimizer of this run does not keep; use the optimizer that wrote it."
                )
            values = {k: v for k, v in state.items() if k not in large}
            values = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            small.append(ParamState(tuple(sorted(large)), values))
        touched = set()
        if page.state.nbytes and any(state.present for state in small):
            slot = page.state.next_slot
            name = f"{page.state.key}.{slot}"
            self._store.prepare_write(name, page.state.nbytes)
            page.state.advance(slot, self._write(page, states, name))
            touched.add(name)
        page.small = small
        return touched

    def _write(self, page: Page, states: list[dict[str, Any]], name: str) -> list[list[int]]:
        size = page.state_layout.largest_chunk_bytes
        frame = self._ring.acquire()
        if frame is None or frame.nbytes < size:
            reservation = self._pool.reserve(size, "state", f"the state of page {page.layout.key}")
            own = self._arena.alloc(size)
            sums = self._write_chunks(page, states, name, own)
            self._arena.free(own)
            reservation.free()
        else:
            sums = self._write_chunks(page, states, name, frame)
        if frame is not None:
            self._ring.release(frame)
        return sums

    def _write_chunks(
        self, page: Page, states: list[dict[str, Any]], name: str, frame: Frame
    ) -> list[list[int]]:
        sums = []
        for chunk in page.state_layout.chunks:
            frame.tensor.zero_()
            for segment in chunk.segments:
                _fill(frame, page.layout.params[segment.param], segment, states[segment.param])
            pieces, at = [], 0
            for offset, length in chunk.pieces:
                pieces.append((offset, frame.memory[at : at + length]))
                at += length
            sums.append(list(self._io.write(name, pieces).wait().sums))
        return sums


def _fill(frame: Frame, spec: ParamSpec, segment: Segment, state: dict[str, Any]) -> None:
    for key, dtype, shape, at in segment.tensors:
        value = state.get(key)
        if value is not None:
            part = _part(value, spec, segment, shape)
            frame.tensor[at : at + part.numel() * dtype.itemsize].view(dtype).copy_(part)


def _part(
    value: torch.Tensor, spec: ParamSpec, segment: Segment, shape: tuple[int, ...] | None
) -> torch.Tensor:
    """Return what a segment keeps of `value`, 1-D and in the order of the page."""
    expected = spec.shape if shape is None else shape
    if tuple(value.shape) != tuple(expected):
        raise ConfigError(
            f"the optimizer state of {spec.name} has a tensor of shape {tuple(value.shape)} where "
            f"{tuple(expected)} is expected; it belongs to another model."
        )
    if tuple(expected) == spec.shape and spec.dense:
        if value.numel() and tuple(value.stride()) != spec.stride:
            value = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype).copy_(value)
        flat = value.as_strided((value.numel(),), (1,))
    else:
        flat = value.reshape(-1)
    return flat[segment.start : segment.stop] if shape is None else flat
