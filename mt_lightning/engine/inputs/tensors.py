"""Which tensors can be away while they wait for backward, and how their memory is let go of.

[Note: a tensor is emptied, not replaced]
What autograd, a checkpoint and keyword arguments hold is the tensor object. It stays where it is,
with its history, hooks, version and identity; only its memory is exchanged, by setting `.data`,
which leaves the version counter alone. A tensor that is away has no elements: whoever read it by
mistake would get an error, not a stray pointer.

[Note: alone]
A tensor is emptied only while nobody but checkpoints of units can reach it. Two counts tell: that
of its storage (views, detached twins, what autograd saved of an output) and those of the tensor
itself, in C++ (each checkpoint that holds it by position, each node that saved it) and in Python (a
list of hidden states, a frame that still runs). Any holder that is not known keeps it in RAM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.arena import use_count

LEAST_BYTES = ALIGN_BYTES
"""Smaller tensors stay in RAM: on disk they would take as much as this."""

_PHASE_BYTES = 64
"""Kernels may take another path by an address modulo this, so it is kept."""


@contextmanager
def plainly() -> Iterator[None]:
    """Run operations that no mode of the user's sees or changes."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
    ):
        yield


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a parameter or a view of one: the model's memory."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor keeps alive, as far as they can be told.

    A batch may be a view of the whole data set, a mask an expanded scalar.
    """
    own = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided:
        return own
    return min(own, tensor.untyped_storage().nbytes())


def can_leave(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a kind whose memory can be moved elsewhere and back."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not (tensor.requires_grad and tensor.is_leaf)
        and not is_functorch_wrapped_tensor(tensor)
        and num_bytes(tensor) >= LEAST_BYTES
        and tensor.data_ptr() % tensor.element_size() == 0
    )


class Shape:
    """How a tensor lies in memory, and at which address modulo 64."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        steps = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        self.span_bytes = (steps + 1) * tensor.element_size()
        self.phase = tensor.data_ptr() % _PHASE_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes from the phase on to the last element."""
        return self.phase + self.span_bytes

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as it lies on bytes, `[nbytes]` uint8 or more."""
        own = memory[self.phase : self.phase + self.span_bytes]
        return own.view(self.dtype).as_strided(self.size, self.stride)


def _local_count() -> int:
    thing = object()
    return sys.getrefcount(thing)


def _parameter_count() -> int:
    def count(thing: object) -> int:
        return sys.getrefcount(thing)

    thing = object()
    return count(thing)


_LOCAL_COUNT = _local_count()
"""References to what only a local name holds, as `sys.getrefcount` counts them there. Python 3.10
counts what a caller passes twice, and from 3.14 on some are borrowed."""
_PARAMETER_COUNT = _parameter_count() - 1
"""The same for a parameter, without those of its caller's names."""


def _use_count(tensor: torch.Tensor) -> int:
    """Return how many references C++ has to the tensor; one of them is that of the object."""
    return tensor._use_count()  # pyright: ignore[reportAttributeAccessIssue]


def _is_alone_base(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's base is nothing but another name for all of its memory."""
    base = tensor._base
    if base is None:
        return True
    return (
        type(base) is torch.Tensor
        and _use_count(base) == 2  # the view, and the object made above
        and sys.getrefcount(base) == _LOCAL_COUNT + 1  # C++ holds the object
        and base.data_ptr() == tensor.data_ptr()
        and Shape(base).span_bytes == Shape(tensor).span_bytes
    )


def is_alone(tensor: torch.Tensor, num_locals: int, saved: int, named: int, framed: bool) -> bool:
    """Return whether nobody holds a tensor but checkpoints of units; see the note.

    Args:
        tensor: The tensor.
        num_locals: How many names of the callers hold it.
        saved: How many checkpoints hold it by position.
        named: How many hold it by name.
        framed: Whether its memory is a frame, which holds its own storage once.
    """
    uses = _use_count(tensor)
    if uses != 1 + saved:
        return False
    # C++ shares one reference.
    if sys.getrefcount(tensor) != _PARAMETER_COUNT + num_locals + named + (uses > 1):
        return False
    is_view = tensor._base is not None
    if use_count(tensor.untyped_storage()._cdata) != 2 + framed + is_view:
        return False
    return _is_alone_base(tensor)


def raw(tensor: torch.Tensor, span_bytes: int) -> torch.Tensor:
    """Return a tensor's memory as bytes, `[span_bytes]` uint8."""
    offset = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), offset, (span_bytes,), (1,))


def empty(tensor: torch.Tensor) -> None:
    """Take its memory away from a tensor, and from what it is a view of."""
    for each in (tensor._base, tensor):
        if each is not None:
            each.data = torch.empty(0, dtype=each.dtype, device=each.device)


def fill(tensor: torch.Tensor, memory: torch.Tensor, shape: Shape, base: Shape | None) -> None:
    """Give a tensor memory that holds its bytes, and what it is a view of too."""
    if base is not None:
        assert tensor._base is not None
        tensor._base.data = base.on(memory)
    tensor.data = shape.on(memory)
