"""Formats whose state is one record of a fixed length for every 128 elements.

[Note: records]
A tensor is flattened in memory order and cut into blocks of 128 elements; zeros pad the last one.
The state of a block is one record of a fixed length at a fixed place, so any range of blocks can be
read, stepped and written by itself. A record of `fp32` holds 128 values of m, then 128 of v. A
packed record holds

    m codes (64 bytes) | v codes | scale of m (bfloat16) | scale of v (bfloat16)

and one of m8v8

    m codes (128 bytes) | v codes (128 bytes) | scale of m (bfloat16) | scale of v (float32)

[Note: m codes]
Four bits, E2M1: a sign and one of {0, .5, 1, 1.5, 2, 3, 4, 6} times the scale. Byte j holds element
j in its low half and element j + 64 in its high half. The scale is a sixth of the largest |m|, cut
to bfloat16, so the largest element always takes the largest code. Rounding is to nearest. The zero
matters: a weight that never sees a gradient must keep m == 0, or it would move for ever.

m8v8 has eight bits, E4M3: a sign in the highest bit and a magnitude. Magnitude 0 is zero; k from 1
to 127 is the float whose bits are those of 1 minus (127 - k) << 20, times the scale: 8 levels in an
octave down to 1.25 * 2^-16. The scale is the largest |m| rounded to bfloat16, so the largest
element takes code 127. Rounding is to nearest, as if code 0 were the level below, 1.125 * 2^-16.
So m fades to zero where gradients have ended, for beta1 up to .94: half a level is 5.6% at most.

[Note: v codes]
v needs range, not precision, and no zero: levels are powers of a base below the block's scale.
Level k stands for `2^lowest * step^k` times the scale:

    format  levels  step between levels         range  bytes  how k is stored
    m4v4      16    x1.5, x1.33 in turn (E3M1)    192     64   as m
    R2         8    x2                            128     48   low two bits as R0, high bits behind:
                                                               bit i of byte j is of k[j + 16 i]
    R1         6    x2                             32     43   k[j] + 6 k[j+43] + 36 k[j+86]
    R0         4    x4                             64     32   k[j] | k[j+32] << 2 | k[j+64] << 4
                                                               | k[j+96] << 6
    m8v8     256    1/16 of the octave's start  61680    128   one byte each

The scale is the largest v (m4v4: two thirds of it, so that the top level is 1.5), cut to bfloat16.
In m8v8 it is the largest v as it is: a cut takes .4% of it on average, four times what a step at
beta2 = .999 takes from it, and would hold the largest v of a block down.
Values below the lowest level are raised to it. Rounding is stochastic and unbiased between the two
neighbours: (1 - beta2) g^2 is far below half a level, so rounding to nearest would never move v.

A scale below 2^-126 is flushed to zero (v of m8v8: below 2^-110, so that no level is denormal), and
its half of the record then decodes to zeros; so a record of zero bytes is the state of a fresh
tensor.

[Note: kappa]
The update divides by sqrt(v), and by Jensen's inequality the mean of 1/sqrt over a v that jumps
between levels is above 1/sqrt of its mean: by about 1 + 3/16 * gap / v. Steps would be too long by
that factor, so the root is taken of v' + (kappa^2 - 1) * beta2 * v, which lengthens the stored part
only. R1's is calibrated on training runs. The others are set by the noise of a stationary gradient:
m4v4 and R2 keep about 2-3% of the error and R0 4%, as R1 does, since values raised to the lowest
level err to the other side. m8v8 errs by less than .7% either way for beta2 from .95 to .999.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mt_lightning.optim.packed.place import BLOCK_NUMEL, Place

GRAIN_NUMEL = 1 << 19
"""State is cut at multiples of it: the bytes of so many elements are a multiple of 4096."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to keep m and v.

    Attributes:
        name: What users write.
        code: Number by which kernels know it.
        v_bytes: Bytes of the v codes in a record.
        m_bytes: Bytes of the m codes.
        scale_bytes: Bytes of both scales.
        num_levels: Levels of v.
        top_level: The highest of them.
        draw_bits: Random bits with which v is rounded.
        level_shift: A level's float bits are its code shifted left by so much, plus those of
            level 0.
        kappa: Factor on the root that undoes the mean error of coded v.
        exact: Whether the state is kept as fp32 Adam has it, bit for bit.
    """

    name: str
    code: int
    v_bytes: int
    m_bytes: int = BLOCK_NUMEL // 2
    scale_bytes: int = 4
    num_levels: int = 0
    top_level: float = 1.0
    draw_bits: int = 16
    level_shift: int = 0
    kappa: float = 1.0
    exact: bool = False

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of one block."""
        return 8 * BLOCK_NUMEL if self.exact else self.m_bytes + self.v_bytes + self.scale_bytes

    @property
    def is_byte_wide(self) -> bool:
        """Whether each code is a byte."""
        return self.m_bytes == self.v_bytes == BLOCK_NUMEL

    @property
    def lowest_level(self) -> float:
        """Level 0 of v."""
        return float(np.array(self.lowest_bits, np.int32).view(np.float32))

    @property
    def lowest_bits(self) -> int:
        """The float32 bits of level 0 of v."""
        top_bits = int(np.float32(self.top_level).view(np.int32))
        return top_bits - (self.num_levels - 1 << self.level_shift)

    @property
    def bits_per_value(self) -> float:
        """Bits for each of the two values per element, scales included."""
        return 8 * self.record_bytes / (2 * BLOCK_NUMEL)

    def grain_numel(self, place: Place) -> int:
        """Return at multiples of how many elements the state of a tensor can be cut."""
        del place
        return GRAIN_NUMEL

    def grain_bytes(self, place: Place) -> int:
        """Return the bytes of the state of so many elements, a multiple of 4096."""
        return self.grain_numel(place) // BLOCK_NUMEL * self.record_bytes

    def state_bytes(self, place: Place) -> int:
        """Return the bytes of the state of a tensor, or of a stretch that begins at a grain."""
        return place.num_blocks * self.record_bytes


FP32 = Format(name="fp32", code=0, v_bytes=512, exact=True)
M8V8 = Format(
    name="m8v8",
    code=6,
    m_bytes=128,
    v_bytes=128,
    scale_bytes=6,
    num_levels=256,
    draw_bits=15,
    level_shift=19,
    kappa=1.003,
)
M4V4 = Format(
    name="m4v4", code=1, v_bytes=64, num_levels=16, top_level=1.5, level_shift=22, kappa=1.06
)
R2 = Format(name="R2", code=2, v_bytes=48, num_levels=8, level_shift=23, kappa=1.14)
R1 = Format(name="R1", code=3, v_bytes=43, num_levels=6, level_shift=23, kappa=1.12)
R0 = Format(name="R0", code=4, v_bytes=32, num_levels=4, level_shift=24, kappa=1.32)
