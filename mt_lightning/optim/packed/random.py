"""Random bits without state: a hash of where and when, so that a resumed run draws the same."""

from __future__ import annotations

_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio; spreads neighbouring indices before they are hashed."""


def lowbias32(x: int) -> int:
    """Mix 32 bits.

    Source: C. Wellons, "Prospecting for Hash Functions" (2018).
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def key(seed: int, step: int, tensor_id: int) -> int:
    """Return the 32-bit key of one tensor's step.

    Args:
        seed: Seed of the optimizer, of any size and sign.
        step: Number of the step.
        tensor_id: Position of the parameter over all param groups, in order.
    """
    mixed = 0
    for value in (seed, step, tensor_id):
        bits = value & 0xFFFFFFFFFFFFFFFF
        for half in (bits & _MASK, bits >> 32):
            mixed = lowbias32(mixed ^ half) + GOLDEN & _MASK
    return mixed
