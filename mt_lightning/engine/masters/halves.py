"""A master while it is stepped, and what its rest is made of when it comes from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mt_lightning.optim.masters import REST_DTYPE, join, round_to, split
from mt_lightning.pages.layout import ParamSpec
from mt_lightning.pages.state import MASTER_REST, Chunk, Segment, StatePart
from mt_lightning.tiers.arena import Frame


@dataclass(frozen=True)
class Half:
    """A weight, or a slice of one, and the rest of its master; both are views of frames."""

    weight: torch.Tensor
    rest: torch.Tensor

    def master(self) -> torch.Tensor:
        """Return the fp32 master, in the memory order of the weight."""
        dense = empty_like(self.weight, torch.float32)
        return join(self.weight, self.rest, dense)

    def take(self, master: torch.Tensor) -> None:
        """Write a master back."""
        split(master, self.weight, self.rest)


def empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor for the values of another dtype, in the same memory order where dense."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.preserve_format)


def whole_masters(dtypes: list[torch.dtype], specs: tuple[ParamSpec, ...]) -> list[torch.Tensor]:
    """Return memory for the values of all parameters of a page."""
    return [
        torch.empty_strided(spec.shape, spec.stride, dtype=dtype)
        if spec.dense
        else torch.empty(spec.shape, dtype=dtype)
        for dtype, spec in zip(dtypes, specs, strict=True)
    ]


def write_weight(spec: ParamSpec, plane: torch.Tensor, values: torch.Tensor) -> None:
    """Write the values of a parameter to its weight plane: of fp32 masters the upper halves."""
    if values.dtype != torch.float32 or spec.dtype != torch.bfloat16:
        spec.view(plane).copy_(values)
    elif spec.dense:
        round_to(spec.flat(plane), ordered(values, spec))
    else:
        weight = torch.empty(spec.shape, dtype=torch.bfloat16)
        round_to(weight, values)
        spec.view(plane).copy_(weight)


def rest_parts(chunk: Chunk) -> list[tuple[Segment, StatePart]]:
    """Return the segments of a chunk that have rests of masters, and where those lie."""
    return [(s, part) for s in chunk.segments for part in s.parts if part.key == MASTER_REST]


def fill_rest(
    frame: Frame,
    spec: ParamSpec,
    segment: Segment,
    part: StatePart,
    source: torch.Tensor | None,
) -> None:
    """Write the rest of what a segment covers.

    Args:
        frame: The state of the chunk.
        spec: The parameter.
        segment: The segment.
        part: Where its rest lies.
        source: int16: the rest of the whole parameter; float32: its values, whose rest is taken;
            another dtype, or None: values that bfloat16 holds, without a rest.
    """
    rest = part.of(frame.tensor)
    if source is None or source.dtype not in (torch.float32, REST_DTYPE):
        rest.zero_()
        return
    values = ordered(source, spec)[segment.start : segment.stop]
    if source.dtype == REST_DTYPE:
        rest.copy_(values)
    else:
        split(values, None, rest)


def ordered(values: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """Return the values of a parameter, 1-D, in the order in which its state lies."""
    values = values.detach()
    if not spec.dense:
        return values.reshape(-1)
    if values.numel() and tuple(values.stride()) != spec.stride:
        values = torch.empty_strided(spec.shape, spec.stride, dtype=values.dtype).copy_(values)
    return values.as_strided((values.numel(),), (1,), values.storage_offset())
