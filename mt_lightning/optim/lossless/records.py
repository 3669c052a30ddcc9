"""The record of a block: 128 float32 patterns in as few bytes as a fast kernel can make of them.

[Note: what of a float32 can be packed]
The mantissa bits of Adam's moments are noise, and so are the signs of the first moment. What is
left are eight exponent bits, and inside a block the exponents lie near each other. A block keeps
3 bits for each value: seven codes for a window of seven exponents, the eighth for those outside,
2 to 20 % in practice. Each of them takes 4 bits more for the ten exponents below the window and the
five above, and another byte beyond these. Signs cost nothing where all are clear, as in the second
moment. zstd on the exponent bytes comes within 2 % of this, on either side, and is several times
slower.

Two bytes of every block lie apart from its record: its kind, and its base, the lowest exponent of
the window.

    ZERO      nothing: 128 times +0.0
    RAW       the 512 bytes
    SPARSE    mask[16], then the patterns that are not +0.0, 4 bytes each
    SIGNED    codes[48], low[128] of 2 bytes, top[128], tail
    UNSIGNED  codes[48], low[128] of 2 bytes, top[112], tail

To the kind of the last two half the length of the tail is added. Value `16 * i + j` has its code in
bits `3 * i` to `3 * i + 2` of the 24-bit word j, which is spread over the bytes j, 16 + j and
32 + j of `codes`: 16 values are coded at a time, whatever the vector width. `low` is the lower half
of the pattern; a byte of `top` is mantissa bits 16 to 22 and the sign, or, without signs, bit i of
what the value `112 + j` has there, for i below 7 and in byte `16 * i + j`. The tail has a nibble
for each value outside, lower half first: `base - 1 - exponent`, `exponent - base + 3` or 15; then
the exponent of each 15; both in order of `8 * j + i`; and is filled up to even length.

[Note: fast numba]
A slice costs more than the work on 16 values, so kernels take whole arrays and offsets. Offsets and
loop counters are unsigned: numba would otherwise look for negative indices in every iteration, and
mixed signs make floats. Casts to uint32 keep the arithmetic in 32 bits.
"""

from __future__ import annotations

import numpy as np

from mt_lightning.optim.jit import jit

BLOCK_NUMEL = 128
BLOCK_BYTES = 4 * BLOCK_NUMEL

ZERO, RAW, SPARSE, SIGNED = 0, 1, 2, 3
SIGNED_BYTES = 48 + 256 + 128
UNSIGNED_BYTES = 48 + 256 + 112
UNSIGNED = SIGNED + (BLOCK_BYTES - SIGNED_BYTES) // 2
KINDS_END = UNSIGNED + (BLOCK_BYTES - UNSIGNED_BYTES) // 2

ESCAPE = 7
NUM_BELOW, NUM_ABOVE, FAR = 10, 5, 15

_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_BIT_OF = np.zeros(64, np.uint8)
for _bit in range(64):
    _BIT_OF[(int(_DE_BRUIJN) << _bit) % 2**64 >> 58] = _bit


@jit
def lowest_bit(mask):
    """Return the number of the lowest bit set in `mask` (uint64, not 0)."""
    alone = mask & (~mask + np.uint64(1))
    return np.uint64(_BIT_OF[(alone * _DE_BRUIJN) >> np.uint64(58)])


@jit
def position_of(bit, half):
    """Return which value a bit of the flags stands for: bit `8 * j + i` is value `16 * i + j`."""
    return ((bit & np.uint64(7)) << np.uint64(4)) + (bit >> np.uint64(3)) + np.uint64(8) * half
