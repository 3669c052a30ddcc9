"""The random bits of kernels: those of `random`, of many elements at once."""

from __future__ import annotations

import numpy as np

from mt_lightning.optim.packed.machine import inlined, mul32, shr32, xor32

i32 = np.int32

GOLDEN = i32(0x9E3779B9 - (1 << 32))
"""Factor of an element's index."""

_MIX1 = i32(0x7FEB352D)
_MIX2 = i32(0x846CA68B - (1 << 32))


@inlined
def _mix_rest(x):
    x = mul32(x, _MIX1)
    x = mul32(xor32(x, shr32(x, i32(15))), _MIX2)
    return xor32(x, shr32(x, i32(16)))


@inlined
def salt_of(key, index):
    """Return what all draws of the block that begins at element `index` have in common."""
    high = i32(index >> 32)
    salt = xor32(key, _mix_rest(xor32(high, shr32(high, i32(16)))))
    return xor32(salt, shr32(salt, i32(16)))  # the first step of the hash, taken for all


@inlined
def draw(product, salt):
    """Return 32 random bits: lowbias32 of an element's index times GOLDEN, and the key."""
    return _mix_rest(xor32(xor32(product, shr32(product, i32(16))), salt))
