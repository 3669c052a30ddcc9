"""The state plane: where the optimizer's tensors lie, and in which pieces they are updated.

[Note: chunks]
A sliced page is updated chunk by chunk. Chunk c covers the same byte range of the weight plane, of
the gradient plane and of each section of the state plane (one section per state tensor such as
`exp_avg`, each a mirror of the weight plane). So a parameter of any size is read, updated and
written in slices of a few MiB, while each state tensor is still contiguous on disk and can be
mapped. A page whose optimizer needs whole tensors has one chunk per group of whole parameters
instead.

[Note: masters]
Where weights are the bfloat16 halves of fp32 masters, the other halves are one more state tensor of
each parameter, `MASTER_REST`. State of other width than the weights has wider sections: chunk c
covers the same elements of each.

[Note: coded planes]
A coded plane holds each chunk as a stream of varying length, in a slot that is long enough for the
worst case. What is in RAM is laid out as without coding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mt_lightning.pages.layout import PageLayout, ParamSpec
from mt_lightning.pages.sizes import ALIGN_BYTES, align_up

MASTER_REST = "master_rest"
"""The name of what fp32 masters have beside the bfloat16 weights, among optimizer state."""


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
class StatePart:
    """The part of one state tensor that one chunk updates.

    Attributes:
        key: Name in the optimizer's state.
        dtype: Its dtype.
        shape: Shape of the whole tensor where the part is all of it, None for a slice.
        first: First byte inside the tensor, in memory order.
        nbytes: Bytes of the part.
        at: First byte inside the chunk's frame.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    first: int
    nbytes: int
    at: int

    def of(self, frame: torch.Tensor) -> torch.Tensor:
        """Return the part inside a chunk's frame (uint8, 1-D), flat and of its own dtype."""
        return frame[self.at : self.at + self.nbytes].view(self.dtype)


@dataclass(frozen=True)
class Segment:
    """A run of one parameter's elements that one chunk updates.

    Attributes:
        param: Index of the parameter inside the page.
        start: First element, in memory order.
        stop: One past the last element.
        parts: What of the parameter's state belongs to them.
    """

    param: int
    start: int
    stop: int
    parts: tuple[StatePart, ...]


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

    @cached_property
    def nbytes(self) -> int:
        """Bytes of state in the chunk's frame."""
        return sum(length for _, length in self.pieces)

    def split(self, frame: memoryview) -> list[tuple[int, memoryview]]:
        """Return offset in the plane and memory of each piece, in the chunk's frame."""
        parts, at = [], 0
        for offset, length in self.pieces:
            parts.append((offset, frame[at : at + length]))
            at += length
        return parts


@dataclass(frozen=True)
class StateLayout:
    """The state plane of one page.

    Attributes:
        sliced: Whether parameters may be cut into slices.
        tensors: Every state tensor.
        chunks: The order of the update.
        plain_bytes: Bytes of the plane that tensors and pieces are laid out in.
        formats: Of a packed plane, the name of each parameter's format; else empty.
        slots: Of a coded plane, offset and length of each chunk's slot on disk; else empty.
    """

    sliced: bool
    tensors: tuple[StateTensor, ...]
    chunks: tuple[Chunk, ...]
    plain_bytes: int
    formats: tuple[str, ...] = ()
    slots: tuple[tuple[int, int], ...] = ()

    @cached_property
    def longest_range_bytes(self) -> int:
        """Bytes of the weight plane that the longest chunk covers."""
        return max((chunk.stop - chunk.start for chunk in self.chunks), default=0)

    @cached_property
    def halves_on_blocks(self) -> bool:
        """Whether half of where each chunk begins is the beginning of a block of the drive too."""
        return all(chunk.start % (2 * ALIGN_BYTES) == 0 for chunk in self.chunks)

    @cached_property
    def rest_params(self) -> dict[int, tuple[str, ...]]:
        """The parameters whose weights are halves of fp32 masters, and the key of the rest."""
        return {t.param: (MASTER_REST,) for t in self.tensors if t.key == MASTER_REST}

    @property
    def has_masters(self) -> bool:
        """Whether the weights of some parameter are halves of fp32 masters."""
        return bool(self.rest_params)

    @cached_property
    def master_bytes(self) -> int:
        """Bytes of masters and fp32 gradients that the largest chunk has while it is updated."""
        if not self.has_masters:
            return 0
        numel = max(sum(s.stop - s.start for s in chunk.segments) for chunk in self.chunks)
        return 2 * torch.float32.itemsize * numel

    @cached_property
    def num_kept(self) -> int:
        """How many chunks hold state."""
        return sum(bool(chunk.nbytes) for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of the plane on disk."""
        return sum(length for _, length in self.slots) if self.slots else self.plain_bytes

    @cached_property
    def largest_chunk_bytes(self) -> int:
        """Bytes of the largest chunk's state in RAM."""
        return max((chunk.nbytes for chunk in self.chunks), default=0)

    @cached_property
    def largest_slot_bytes(self) -> int:
        """Bytes of the largest chunk's slot in a coded plane."""
        return max((length for _, length in self.slots), default=0)

    def coded(self, longest: Callable[[int], int]) -> StateLayout:
        """Return this layout with chunks coded on disk.

        Args:
            longest: Maps the bytes of a chunk to those its stream can have.
        """
        slots, offset = [], 0
        for chunk in self.chunks:
            length = align_up(longest(chunk.nbytes)) if chunk.nbytes else 0
            slots.append((offset, length))
            offset += length
        return replace(self, slots=tuple(slots))


def sliced_state(
    layout: PageLayout, kept: list[dict[str, torch.dtype]], slice_bytes: int
) -> StateLayout:
    """Lay out the state of an element-wise optimizer.

    Args:
        layout: The page.
        kept: For each parameter, name and dtype of each of its state tensors, which have its shape.
        slice_bytes: Length of a chunk in the weight plane, a multiple of 4096.
    """
    sections = _sections(layout, kept)
    tensors = [
        StateTensor(i, key, spec.shape, spec.stride, dtype, sections[key].place(spec.offset))
        for i, spec in enumerate(layout.params)
        for key, dtype in kept[i].items()
    ]
    chunks = []
    for index, start in enumerate(range(0, layout.nbytes, slice_bytes)):
        stop = min(start + slice_bytes, layout.nbytes)
        pieces = tuple((s.place(start), s.width * (stop - start)) for s in sections.values())
        segments = tuple(
            _segment(i, spec, start, stop, kept[i], sections)
            for i, spec in enumerate(layout.params)
            if _overlaps(spec, start, stop)
        )
        chunks.append(Chunk(index, start, stop, pieces, segments))
    total = layout.nbytes * sum(section.width for section in sections.values())
    return StateLayout(True, tuple(tensors), tuple(chunks), total)


@dataclass(frozen=True)
class _Section:
    """A part of the state plane that mirrors the weight plane.

    Attributes:
        offset: Its first byte, as a multiple of the weight plane's length.
        plane: That length.
        width: Bytes of state beside each byte of weights.
    """

    offset: int
    plane: int
    width: int

    def place(self, at: int) -> int:
        """Return where the state of a byte of the weight plane begins."""
        return self.offset * self.plane + self.width * at


def _sections(layout: PageLayout, kept: list[dict[str, torch.dtype]]) -> dict[str, _Section]:
    widths: dict[str, int] = {}
    for spec, state in zip(layout.params, kept, strict=True):
        for key, dtype in state.items():
            width, odd = divmod(dtype.itemsize, spec.dtype.itemsize)
            assert width == widths.setdefault(key, width), (spec.name, key)
            assert not odd, (spec.name, key)
    sections: dict[str, _Section] = {}
    for key, width in widths.items():
        offset = sum(section.width for section in sections.values())
        sections[key] = _Section(offset, layout.nbytes, width)
    return sections


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
    kept: dict[str, torch.dtype],
    sections: dict[str, _Section],
) -> Segment:
    size = spec.dtype.itemsize
    first = max(0, (start - spec.offset) // size)
    last = min(spec.numel, (stop - spec.offset) // size)
    inside = spec.offset + first * size - start
    length = stop - start

    def part(key: str, dtype: torch.dtype) -> StatePart:
        section, size = sections[key], dtype.itemsize
        at = section.offset * length + section.width * inside
        return StatePart(key, dtype, None, first * size, max(0, last - first) * size, at)

    return Segment(param, first, last, tuple(part(key, dtype) for key, dtype in kept.items()))


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
            tensor = StateTensor(i, key, shape, stride, dtype, offset)
            tensors.append(tensor)
            at = offset - chunk_start
            inside.append(StatePart(key, dtype, shape, 0, tensor.nbytes, at))
            offset += tensor.nbytes
        segments.append(Segment(i, 0, spec.numel, tuple(inside)))
        if offset - chunk_start >= group_bytes or i == len(layout.params) - 1:
            offset = align_up(offset)
            pieces = ((chunk_start, offset - chunk_start),) if offset > chunk_start else ()
            chunks.append(Chunk(len(chunks), 0, layout.nbytes, pieces, tuple(segments)))
            segments, chunk_start = [], offset
    return StateLayout(False, tuple(tensors), tuple(chunks), offset)
