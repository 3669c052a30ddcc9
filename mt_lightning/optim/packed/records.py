"""Formats whose state is one record of a fixed length for every 128 elements.

[Note: records]
A tensor is flattened in memory order and cut into blocks of 128 elements; zeros pad the last one.
The state of a block is one record of a fixed length at a fixed place, so any range of blocks can be
read, stepped and written by itself. A record of `fp32` holds 128 values of m, then 128 of v. A
packed record holds

    m codes (64 bytes) | v codes | scale of m (bfloat16) | scale of v (bfloat16)

[Note: m codes]
Four bits, E2M1: a sign and one of {0, .5, 1, 1.5, 2, 3, 4, 6} times the scale. Byte j holds element
j in its low half and element j + 64 in its high half. The scale is a sixth of the largest |m|, cut
to bfloat16, so the largest element always takes the largest code. Rounding is to nearest. The zero
matters: a weight that never sees a gradient must keep m == 0, or it would move for ever.

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

The scale is the largest v (m4v4: two thirds of it, so that the top level is 1.5), cut to bfloat16.
Values below the lowest level are raised to it. Rounding is stochastic and unbiased between the two
neighbours: (1 - beta2) g^2 is far below half a level, so rounding to nearest would never move v.

A scale below 2^-126 is flushed to zero, and its half of the record then decodes to zeros; so a
record of zero bytes is the state of a fresh tensor.

[Note: kappa]
The update divides by sqrt(v), and by Jensen's inequality the mean of 1/sqrt over a v that jumps
between levels is above 1/sqrt of its mean: by about 1 + 3/16 * gap / v. Steps would be too long by
that factor, so the root is taken of v' + (kappa^2 - 1) * beta2 * v, which lengthens the stored part
only. R1's is calibrated on training runs. The others are set by the noise of a stationary gradient:
m4v4 and R2 keep about 2-3% of the error and R0 4%, as R1 does, since values raised to the lowest
level err to the other side.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        num_levels: Levels of v.
        lowest_exponent: Level 0 is two to this power.
        level_shift: A level's float bits are its code shifted left by so much, plus those of
            level 0.
        kappa: Factor on the root that undoes the mean error of coded v.
        exact: Whether the state is kept as fp32 Adam has it, bit for bit.
    """

    name: str
    code: int
    v_bytes: int
    num_levels: int = 0
    lowest_exponent: int = 0
    level_shift: int = 0
    kappa: float = 1.0
    exact: bool = False

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of one block."""
        return 8 * BLOCK_NUMEL if self.exact else BLOCK_NUMEL // 2 + self.v_bytes + 4

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
M4V4 = Format(
    name="m4v4", code=1, v_bytes=64, num_levels=16, lowest_exponent=-7, level_shift=22, kappa=1.06
)
R2 = Format(
    name="R2", code=2, v_bytes=48, num_levels=8, lowest_exponent=-7, level_shift=23, kappa=1.14
)
R1 = Format(
    name="R1", code=3, v_bytes=43, num_levels=6, lowest_exponent=-5, level_shift=23, kappa=1.12
)
R0 = Format(
    name="R0", code=4, v_bytes=32, num_levels=4, lowest_exponent=-6, level_shift=24, kappa=1.32
)
