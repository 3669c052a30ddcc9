"""Where each parameter lies inside its page: the same bytes on disk, in RAM and on the device.

[Note: one page, three planes]
A page holds the parameters of one set of user units that one optimizer (or none) trains. Its weight
plane is their flat bytes, each parameter at a multiple of 64 bytes in its own memory order. The
state plane is described by `StateLayout`; the gradient plane mirrors the weight plane byte for
byte.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import torch

from mt_lightning.pages.sizes import align_up

PARAM_ALIGN_BYTES = 64
"""torch aligns its own CPU tensors to this; kernels then take the same path on a page."""

_LEAST_CUT_BYTES = 1 << 16
"""Parameters below this never begin a chunk of packed state by themselves."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter inside a page.

    Attributes:
        name: Fully qualified name, the first one `named_parameters()` gives.
        shape: Its shape.
        stride: Its strides in elements; kept, since kernels choose their path by them.
        dtype: Its dtype.
        offset: First byte inside the weight plane.
        span: Elements between the first and the last one, plus one (`numel` where dense).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    span: int

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the elements take inside the page."""
        return self.span * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether the elements fill their span without gaps or overlap, in whatever order."""
        return self.span == self.numel

    @property
    def has_gradient(self) -> bool:
        """Whether autograd can give it one: whole numbers and truth values have none."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def view(self, plane: torch.Tensor) -> torch.Tensor:
        """Return the parameter as a view of `plane` (uint8, the whole weight plane)."""
        return self.flat(plane).as_strided(self.shape, self.stride)

    def flat(self, plane: torch.Tensor) -> torch.Tensor:
        """Return the parameter's span as a 1-D view of `plane`, in memory order."""
        return plane[self.offset : self.offset + self.nbytes].view(self.dtype)


def strided_span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Count the elements of memory that a strided tensor reaches over."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides a page keeps for `tensor`: its own, contiguous where elements overlap."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if strided_span(shape, stride) >= tensor.numel():
        return stride
    return tuple(torch.empty(shape, device="meta").stride())


@dataclass(frozen=True)
class PageLayout:
    """The identity and the weight plane of one page.

    Attributes:
        index: Number of the page; its files are named by it.
        units: Names of the user units, in model order; empty for the resident page.
        optimizer: Index of the optimizer that trains it, None where frozen.
        params: Its parameters in order of offset.
        rank: The shard this layout describes.
        world_size: Into how many shards the page is cut.
        rounds: Whether fp32 gradients wait as bfloat16.
    """

    index: int
    units: tuple[str, ...]
    optimizer: int | None
    params: tuple[ParamSpec, ...]
    rank: int = 0
    world_size: int = 1
    rounds: bool = False

    @property
    def key(self) -> str:
        """The stem of the page's file names."""
        return f"p{self.index:05d}"

    @cached_property
    def used_bytes(self) -> int:
        """Bytes from the start of the plane to the end of the last parameter."""
        return max((spec.offset + spec.nbytes for spec in self.params), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight plane, padded so that O_DIRECT accepts it."""
        return align_up(self.used_bytes + 1)

    @cached_property
    def grad_bytes(self) -> int:
        """Bytes of one gradient for every parameter, as autograd makes it; zero where frozen."""
        if self.optimizer is None:
            return 0
        return sum(spec.numel * spec.dtype.itemsize for spec in self.params)

    @cached_property
    def waiting_bytes(self) -> int:
        """Bytes of the gradient while it waits for its update."""
        if self.optimizer is None:
            return 0
        return sum(spec.numel * self.waits_as(spec).itemsize for spec in self.params)

    def waits_as(self, spec: ParamSpec) -> torch.dtype:
        """Return what the gradient of a parameter is while it waits."""
        return torch.bfloat16 if self.rounds and spec.dtype == torch.float32 else spec.dtype

    @cached_property
    def spills_halves(self) -> bool:
        """Whether a gradient on disk takes half of what the weights take."""
        return self.rounds and all(spec.dtype == torch.float32 for spec in self.params)

    def describe(self) -> dict[str, object]:
        """Return the layout as JSON data."""
        return {
            "units": list(self.units),
            "optimizer": self.optimizer,
            "rank": [self.rank, self.world_size],
            "params": [
                [p.name, list(p.shape), list(p.stride), str(p.dtype), p.offset] for p in self.params
            ],
        }


def lay_out(
    index: int,
    units: tuple[str, ...],
    optimizer: int | None,
    named: list[tuple[str, torch.Tensor, tuple[int, ...]]],
    *,
    packed: bool = False,
    halves: bool = False,
    rounds: bool = False,
) -> PageLayout:
    """Place parameters one after the other.

    Args:
        index: Number of the page.
        units: The user units.
        optimizer: The optimizer that trains it, None where frozen.
        named: Name, tensor (only its metadata is read) and strides of each parameter.
        packed: Whether its optimizer state is packed: parameters of some size then begin where the
            update may be cut.
        halves: Whether floating point weights are the bfloat16 halves of fp32 masters.
        rounds: Whether fp32 gradients wait as bfloat16.
    """
    specs, offset = [], 0
    for name, tensor, stride in named:
        shape = tuple(tensor.shape)
        dtype = torch.bfloat16 if halves and tensor.is_floating_point() else tensor.dtype
        if packed and tensor.numel() * dtype.itemsize >= _LEAST_CUT_BYTES:
            offset = align_up(offset)
        spec = ParamSpec(name, shape, stride, dtype, offset, strided_span(shape, stride))
        specs.append(spec)
        offset = align_up(offset + spec.nbytes, PARAM_ALIGN_BYTES)
    return PageLayout(index, units, optimizer, tuple(specs), rounds=rounds)


def fingerprint(layouts: list[PageLayout], formats: list[tuple[str, ...]]) -> str:
    """Hash what a directory of pages must agree on with the model that opens it.

    Args:
        layouts: The pages.
        formats: For each page, the formats of its packed optimizer state.
    """
    described = [layout.describe() for layout in layouts]
    text = json.dumps([described, [list(names) for names in formats]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
