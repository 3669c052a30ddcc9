"""fp32 master weights in two halves: the bfloat16 that is computed with, and the rest.

[Note: the split]
With the 32 bits of a master as the integer u, the weight is `(u + 0x8000) >> 16` and the rest is
the low half of u as a signed number, so that `u == (weight << 16) + rest`: every master comes back
in every bit. The weight is the nearest bfloat16. At exact ties it is the one away from zero, where
torch's conversion takes the even one: with 16 bits of rest an even choice could not be undone. A
NaN comes back as a NaN, but one whose weight would not be a NaN loses its payload.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

REST_DTYPE = torch.int16
_TIE = 0x8000
_NO_SIGN = 0x7FFFFFFF
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_PIECE_NUMEL = 1 << 18


def split(master: torch.Tensor, weight: torch.Tensor | None, rest: torch.Tensor | None) -> None:
    """Write the two halves of masters.

    Args:
        master: float32, any shape and strides.
        weight: bfloat16, of the same shape, overwritten; None: not wanted.
        rest: int16, of the same shape, overwritten; None: not wanted.
    """
    for values, upper, lower in _pieces(master.detach(), weight, rest):
        assert values is not None
        bits = values.view(torch.int32)
        # A device is not asked: the answer would have to be waited for.
        if not values.is_cpu or (bool(values.numel()) and bool(values.amax().isnan())):
            bits = _tame(bits)
        if lower is not None:
            lower.copy_(bits)  # the low half
        if upper is not None:
            upper.view(REST_DTYPE).copy_((bits + _TIE).bitwise_right_shift_(16))


def join(weight: torch.Tensor, rest: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the masters of two halves to `out`, and return it.

    Args:
        weight: bfloat16, any shape and strides.
        rest: int16, of the same shape.
        out: float32, of the same shape; overwritten.
    """
    for values, upper, lower in _pieces(out.detach(), weight, rest):
        assert values is not None
        assert upper is not None
        assert lower is not None
        bits = values.view(torch.int32)
        bits.copy_(upper.view(REST_DTYPE)).bitwise_left_shift_(16).add_(lower)
    return out


def round_to(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write the weights that stand for float32 values to `weight`, bfloat16, and return it."""
    split(values, weight, None)
    return weight


def _pieces(*tensors: torch.Tensor | None) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Yield parts of tensors of one shape that stay in a processor's cache while they are used."""
    given = [t.detach() for t in tensors if t is not None]
    small = given[0].numel() <= _PIECE_NUMEL or not given[0].is_cpu
    if small or not all(t.is_contiguous() for t in given):
        yield tensors
        return
    flat = [t.detach().view(-1) if t is not None else None for t in tensors]
    for start in range(0, given[0].numel(), _PIECE_NUMEL):
        stop = start + _PIECE_NUMEL
        yield tuple(t[start:stop] if t is not None else None for t in flat)


def _tame(bits: torch.Tensor) -> torch.Tensor:
    """Replace NaNs whose upper half is that of another number, by one of the same sign."""
    is_nan = (bits & _NO_SIGN) > _INFINITY
    upper = (bits + _TIE) >> 16
    stays = ((upper & 0x7FFF) > _INFINITY >> 16) & ((upper < 0) == (bits < 0))
    sign = bits & ~_NO_SIGN
    return torch.where(is_nan & ~stays, sign | _NAN, bits)
