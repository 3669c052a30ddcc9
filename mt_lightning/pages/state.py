"""The state plane: where the optimizer's tensors lie, and in which pieces they are updated.

[Note: chunks]
A sliced page is updated chunk by chunk. Chunk c covers the same byte range of the weight plane, of
the gradient plane and of each section of the state plane (one section per state tensor such as
`exp_avg`, each a mirror of the weight plane). So a parameter of any size is read, updated and
written in slices of a few MiB, while each state tensor is still contiguous on disk and can be
mapped. A page whose optimizer needs whole tensors has one chunk per group of whole parameters
instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mt_lightning.pages.layout import PageLayout, ParamSpec
from mt_lightning.pages.sizes import align_up


@dataclass(frozen=True)
class StateTensor:
    """One tensor of one parameter's optimizer state.

    Attributes:
        param: Index of the parameter inside the page.
        key: Name in the optimizer's state, such as `exp_avg`.
        shape: Its shape.
        stride: Its strides in elements.
        dtype: Its dtype.
        offset: First byte inside the state plane.
    """

    param: int
    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Segment:
    """A run of one parameter's elements that one chunk updates.

    Attributes:
        param: Index of the parameter inside the page.
        start: First element, in memory order.
        stop: One past the last element.
        tensors: Key, dtype, shape and first byte inside the chunk's frame of each state tensor;
            the shape is None for a slice of a mirror.
    """

    param: int
    start: int
    stop: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...] | None, int], ...]


@dataclass(frozen=True)
class Chunk:
    """What is updated at one go.

    Attributes:
        index: Number inside the page.
        start: First byte of the weight plane it covers.
        stop: One past the last byte.
        pieces: Offset and length of each range of the state plane, in the order of the frame.
        segments: The parameters' parts inside it.
    """

    index: int
    start: int
    stop: int
    pieces: tuple[tuple[int, int], ...]
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of state in the chunk's frame."""
        return sum(length for _, length in self.pieces)


@dataclass(frozen=True)
class StateLayout:
    """The state plane of one page.

    Attributes:
        sliced: Whether parameters may be cut into slices.
        tensors: Every state tensor.
        chunks: The order of the update.
        nbytes: Bytes of the plane.
    """

    sliced: bool
    tensors: tuple[StateTensor, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int

    @property
    def largest_chunk_bytes(self) -> int:
        """Bytes of the largest chunk's state."""
        return max((chunk.nbytes for chunk in self.chunks), default=0)


def sliced_state(layout: PageLayout, keys: list[tuple[str, ...]], slice_bytes: int) -> StateLayout:
    """Lay out the state of an element-wise optimizer.

    Args:
        layout: The page.
        keys: For each parameter, the names of its state tensors (shape and dtype of the parameter).
        slice_bytes: Length of a chunk in the weight plane, a multiple of 4096.
    """
    sections = tuple(dict.fromkeys(key for names in keys for key in names))
    plane = layout.nbytes
    tensors = [
        StateTensor(
            i, key, spec.shape, spec.stride, spec.dtype, sections.index(key) * plane + spec.offset
        )
        for i, spec in enumerate(layout.params)
        for key in keys[i]
    ]
    chunks = []
    for index, start in enumerate(range(0, plane, slice_bytes)):
        stop = min(start + slice_bytes, plane)
        pieces = tuple((k * plane + start, stop - start) for k in range(len(sections)))
        segments = tuple(
            _segment(i, spec, start, stop, keys[i], sections)
            for i, spec in enumerate(layout.params)
            if _overlaps(spec, start, stop)
        )
        chunks.append(Chunk(index, start, stop, pieces, segments))
    return StateLayout(True, tuple(tensors), tuple(chunks), plane * len(sections))


def _overlaps(spec: ParamSpec, start: int, stop: int) -> bool:
    """Return whether a chunk updates part of a parameter; an empty one belongs to one chunk too."""
    if not spec.numel:
        return start <= spec.offset < stop
    return spec.offset < stop and spec.offset + spec.nbytes > start


def _segment(
    param: int,
    spec: ParamSpec,
    start: int,
    stop: int,
    keys: tuple[str, ...],
    sections: tuple[str, ...],
) -> Segment:
    size = spec.dtype.itemsize
    first = max(0, (start - spec.offset) // size)
    last = min(spec.numel, (stop - spec.offset) // size)
    inside = spec.offset + first * size - start
    length = stop - start
    return Segment(
        param,
        first,
        last,
        tuple((key, spec.dtype, None, sections.index(key) * length + inside) for key in keys),
    )


def whole_state(
    layout: PageLayout,
    shapes: list[dict[str, tuple[tuple[int, ...], torch.dtype]]],
    group_bytes: int,
) -> StateLayout:
    """Lay out the state of an optimizer that must see whole tensors.

    Args:
        layout: The page.
        shapes: For each parameter, the shape and dtype of each of its state tensors.
        group_bytes: Parameters are gathered into one chunk until their state passes this.
    """
    tensors: list[StateTensor] = []
    chunks: list[Chunk] = []
    segments: list[Segment] = []
    offset = chunk_start = 0
    for i, spec in enumerate(layout.params):
        inside = []
        for key, (shape, dtype) in shapes[i].items():
            offset = align_up(offset, 64)
            alike = shape == spec.shape and spec.dense
            stride = spec.stride if alike else tuple(torch.empty(shape, device="meta").stride())
            tensors.append(StateTensor(i, key, shape, stride, dtype, offset))
            inside.append((key, dtype, shape, offset - chunk_start))
            offset += tensors[-1].nbytes
        segments.append(Segment(i, 0, spec.numel, tuple(inside)))
        if offset - chunk_start >= group_bytes or i == len(layout.params) - 1:
            offset = align_up(offset)
            pieces = ((chunk_start, offset - chunk_start),) if offset > chunk_start else ()
            chunks.append(Chunk(len(chunks), 0, layout.nbytes, pieces, tuple(segments)))
            segments, chunk_start = [], offset
    return StateLayout(False, tuple(tensors), tuple(chunks), offset)
