"""Format C5: one number for each column of a tensor takes the place of codes of v.

[Note: rank one]
v of a weight matrix is close to (something of the row) x (something of the column). So it is kept
as one float for each block of 128 elements, its mean, and one for each column. What the update
divides by then varies little from step to step, and m is coded in units of it, the square root of
the column, so that its rounding is spread evenly over what the update uses. Nothing is random.

[Note: panels]
A tensor is flattened in memory order and cut into panels of 2^19 elements, or of the next multiple
that is worth 64 rows, so that two vectors for each panel are small beside its records. Panels know
nothing of each other: state is cut at panels, threads take whole ones. Blocks and panels may end
anywhere in a row; the column of an element is its index in the tensor modulo the width. The bytes
of a panel are

    records (85 bytes each) | zeros up to a multiple of 4 | cols_old | cols
                                                            (float32 [width] each)

and zeros up to a multiple of 4096 behind a full one. Zero stands for 1 in both vectors, so a panel
of zero bytes is the state of a fresh tensor. The vectors add 32 bits over the rows of a panel to
the 2.66 bits of a value: half a bit at most, a quarter at 4096 columns, .03 at 512. A record holds

    bytes 0-63    low four bits of q: byte j has element j in its low half, j + 64 in its high half
    bytes 64-79   signs of q: bit i of byte j is of element j + 16 i
    bytes 80-81   a, bfloat16
    bytes 82-84   s, float32 without its lowest byte

    m = (q * a) * sqrt(cols_old)        v = k * cols        k = s * (n / sum of cols over the block)

q is in two's complement, from -15 to 15; n is 128, and less in the last block of a tensor. q is
rounded to nearest and zero where m is small: a weight that never sees a gradient keeps m == 0.

[Note: a step of a panel]
In float32, every operation rounded by itself (divisions by sqrt(cols), a' and s' as a
multiplication by the inverse, which is shared), with w1 = 1 - b1, w2 = 1 - b2:

    m'  = m + w1 * (g - m)
    x   = (-lr / (1 - b1^t) * m') / (sqrt(.93 b2 / (1 - b2^t) * k * cols + w2 / (1 - b2^t) * g^2)
          + eps)
    p'  = p * (1 - lr * wd) + clamp(x, lim)              lim = lr * max(1, (1 - b1) / sqrt(1 - b2))
    s'  = b2 * s + w2 * (mean of g^2 over the block)     rounded to 24 bits
    y   = m' / sqrt(cols)
    a'  = max |y| / 15                                   rounded to bfloat16
    q'  = y / a'                                         rounded
    acc[column] += min(g^2 * (1 - b2^t) / s', 4096)

and behind the last block, in float64,

    f   = acc / count of the column in the panel         divided by the mean of f
    c   = max(cols + rho * (f - cols), 2^-16)            rho = (1 - b2) / (1 - b2^t), 1 at first
    cols_old, cols = cols, c / mean of c                 rounded to 16 bits behind the first

Vectors for a given v are found by the same fold with f = v / k, four times: k of each block takes
the columns of the round before, which are all one at first.

.93 is kappa^2 of this format (see records), below 1 since the mean of a row and a column is
smoother than v. lim is the bound that a step of Adam keeps by itself (Kingma & Ba, 2015, section
2.1); an element whose v is far above its row and column would break it.

Sums over a block have 16 lanes, each in order, and then halves are added. acc is summed block by
block, in a vector of width + 128 numbers whose end is added to its beginning afterwards.

[Note: what is too small and too large]
a' below 2^-100 and s' below 2^-126 become 0. A block whose mean of g^2 is below 2^-100 adds nothing
to acc, nor do panels without gradients move cols. Where y or s' is beyond 2^100, infinite or NaN,
the record stays as it was and adds nothing to acc: its m is then read with the cols of this step
instead of those before, which changes it little. beta2 up to .9999 is what 24 bits of s are
enough for: closer to 1, s stands still where g^2 is a tenth off its mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from mt_lightning.optim.packed.place import BLOCK_NUMEL, Place
from mt_lightning.optim.packed.records import Format
from mt_lightning.pages.sizes import align_up

PANEL_NUMEL = 1 << 19
"""Elements of a panel, unless rows are long."""

_MIN_ROWS = 64
"""Rows that a panel must have."""

KAPPA_SQUARED = 0.93
"""What the decayed part of v is multiplied by under the root."""

FIT_ROUNDS = 4
"""How often columns are fitted to a given v."""


@dataclass(frozen=True, kw_only=True)
class PanelFormat(Format):
    """A format with records for blocks and vectors for the columns of a panel."""

    @property
    @override
    def record_bytes(self) -> int:
        return 64 + 16 + 2 + 3

    @override
    def grain_numel(self, place: Place) -> int:
        """Return the elements of a panel."""
        return PANEL_NUMEL * max(1, -(-_MIN_ROWS * place.width // PANEL_NUMEL))

    @override
    def grain_bytes(self, place: Place) -> int:
        """Return the bytes of a full panel, a multiple of 4096."""
        return align_up(self._panel_bytes(self.grain_numel(place), place.width))

    @override
    def state_bytes(self, place: Place) -> int:
        """Return the bytes of the state of a tensor, or of a stretch that begins at a panel."""
        num_full, rest = divmod(place.numel, self.grain_numel(place))
        last_bytes = self._panel_bytes(rest, place.width) if rest else 0
        return num_full * self.grain_bytes(place) + last_bytes

    def vectors_at(self, numel: int) -> int:
        """Return where the vectors of a panel of `numel` elements begin."""
        return align_up(-(-numel // BLOCK_NUMEL) * self.record_bytes, 4)

    def _panel_bytes(self, numel: int, width: int) -> int:
        return self.vectors_at(numel) + 2 * 4 * width


C5 = PanelFormat(name="C5", code=5, v_bytes=0, kappa=KAPPA_SQUARED**0.5)
