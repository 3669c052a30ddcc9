"""The state plane of packed optimizer state.

[Note: grains]
A packed format keeps the state of a parameter as one string of bytes that can be cut at certain
elements only: at multiples of a grain, whose bytes are a multiple of 4096. Chunks are therefore cut
at grains of one large parameter, or between parameters that begin at multiples of 4096 bytes; small
parameters share a chunk. The bytes of one parameter are contiguous on disk. Where weights are the
halves of fp32 masters, the rests lie behind all packed state and mirror the weight plane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mt_lightning.pages.layout import PageLayout, ParamSpec
from mt_lightning.pages.sizes import ALIGN_BYTES, align_up
from mt_lightning.pages.state import (
    MASTER_REST,
    Chunk,
    Segment,
    StateLayout,
    StatePart,
    StateTensor,
)

_STATE_ALIGN_BYTES = 64
"""The state of each parameter begins at a multiple of this."""

PACKED_KEY = "packed"
"""The name of packed state in an optimizer's state."""


@dataclass(frozen=True)
class Packing:
    """How the state of one parameter is packed.

    Attributes:
        format: Name of the format.
        grain_numel: It may be cut at multiples of so many elements.
        grain_bytes: Bytes of the state of so many elements, a multiple of 4096.
        nbytes: Bytes of the state of the whole parameter.
        width: Elements of a row of the parameter; nothing here depends on it.
    """

    format: str
    grain_numel: int
    grain_bytes: int
    nbytes: int
    width: int

    def first_byte(self, element: int) -> int:
        """Return where the state of the elements from `element` on begins, inside the string."""
        assert element % self.grain_numel == 0
        return element // self.grain_numel * self.grain_bytes

    def last_byte(self, element: int, numel: int) -> int:
        """Return where the state of the elements before `element` ends."""
        return self.nbytes if element == numel else self.first_byte(element)


def packed_state(layout: PageLayout, packings: list[Packing], slice_bytes: int) -> StateLayout:
    """Lay out packed state.

    Args:
        layout: The page; its parameters are dense, and float32 or bfloat16 halves of masters.
        packings: How the state of each is packed.
        slice_bytes: What a chunk should cover of the weight plane; it is longer where one grain is.
    """
    maker = _Maker(slice_bytes)
    for i, (spec, packing) in enumerate(zip(layout.params, packings, strict=True)):
        assert spec.dtype in (torch.float32, torch.bfloat16)
        maker.add(i, spec, packing)
    chunks, tensors, nbytes = maker.finish(layout.nbytes)
    if any(spec.dtype == torch.bfloat16 for spec in layout.params):
        chunks = tuple(_with_rests(chunk, layout, nbytes) for chunk in chunks)
        tensors += tuple(
            StateTensor(i, MASTER_REST, s.shape, s.stride, torch.int16, nbytes + s.offset)
            for i, s in enumerate(layout.params)
        )
        nbytes += layout.nbytes
    formats = tuple(packing.format for packing in packings)
    return StateLayout(True, tensors, chunks, nbytes, formats)


def _with_rests(chunk: Chunk, layout: PageLayout, behind: int) -> Chunk:
    """Return a chunk with the rests of its masters, which begin at byte `behind` of the plane."""
    assert chunk.start % ALIGN_BYTES == chunk.stop % ALIGN_BYTES == 0
    size = torch.int16.itemsize
    segments = []
    for segment in chunk.segments:
        spec = layout.params[segment.param]
        at = chunk.nbytes + spec.offset + segment.start * size - chunk.start
        nbytes = (segment.stop - segment.start) * size
        part = StatePart(MASTER_REST, torch.int16, None, segment.start * size, nbytes, at)
        segments.append(replace(segment, parts=(*segment.parts, part)))
    piece = (behind + chunk.start, chunk.stop - chunk.start)
    return replace(chunk, pieces=(*chunk.pieces, piece), segments=tuple(segments))


class _Maker:
    """Gathers segments into chunks."""

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._chunks: list[Chunk] = []
        self._tensors: list[StateTensor] = []
        self._segments: list[Segment] = []
        self._start = 0
        """First byte of the weight plane of the chunk that is being made."""
        self._offset = 0
        """First byte of the state plane of that chunk."""
        self._inside = 0
        """Bytes of state it has so far."""

    def add(self, param: int, spec: ParamSpec, packing: Packing) -> None:
        """Append a parameter."""
        full = spec.offset + spec.nbytes - self._start > self._slice_bytes
        if self._segments and full and spec.offset % ALIGN_BYTES == 0:
            self._close(spec.offset)
        self._inside = align_up(self._inside, _STATE_ALIGN_BYTES)
        offset = self._offset + self._inside
        shape = (packing.nbytes,)
        self._tensors.append(StateTensor(param, PACKED_KEY, shape, (1,), torch.uint8, offset))
        size = spec.dtype.itemsize
        numel = packing.grain_numel
        assert numel * size % ALIGN_BYTES == 0
        step = max(1, self._slice_bytes // (size * numel)) * numel
        # Only a parameter that begins a chunk can be cut: its state then lies at multiples of 4096.
        if self._segments or spec.numel <= step:
            step = max(1, spec.numel)
        for start in range(0, max(1, spec.numel), step):
            stop = min(start + step, spec.numel)
            if start:
                self._close(spec.offset + size * start)
            self._append(param, start, stop, spec, packing)

    def _append(self, param: int, start: int, stop: int, spec: ParamSpec, packing: Packing) -> None:
        first = packing.first_byte(start)
        nbytes = packing.last_byte(stop, spec.numel) - first
        part = StatePart(PACKED_KEY, torch.uint8, None, first, nbytes, self._inside)
        self._segments.append(Segment(param, start, stop, (part,)))
        self._inside += nbytes

    def _close(self, stop: int) -> None:
        """End the chunk before byte `stop` of the weight plane."""
        length = align_up(self._inside)
        pieces = ((self._offset, length),) if length else ()
        segments = tuple(self._segments)
        self._chunks.append(Chunk(len(self._chunks), self._start, stop, pieces, segments))
        self._segments, self._start, self._inside = [], stop, 0
        self._offset += length

    def finish(self, stop: int) -> tuple[tuple[Chunk, ...], tuple[StateTensor, ...], int]:
        """Return chunks, tensors and the bytes of the plane."""
        if self._segments:
            self._close(stop)
        return tuple(self._chunks), tuple(self._tensors), self._offset
