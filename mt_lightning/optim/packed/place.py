"""Where the elements of a tensor lie: what a format must know of a tensor's shape.

[Note: width]
State follows memory, so the columns of a tensor are those of its memory: the width is the extent of
the innermost dimension, dimensions of one element left out. Where that is short it is multiplied by
the next ones outwards until it reaches 16: a convolution [O, I, 3, 3] has rows of 9 I elements
(I of them if it is channels_last and I >= 16), one with I = 1 has a single row of 9 O (for O >= 2).
A tensor without dimensions or with one is a single row.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_NUMEL = 128
"""Elements whose codes are one record."""

_MIN_WIDTH = 16


@dataclass(frozen=True)
class Place:
    """A tensor, or a stretch of one, flattened in memory order.

    Attributes:
        numel: Its elements.
        width: Its columns: element e has column e modulo `width`.
        dims: Its dimensions, those of one element among them.
    """

    numel: int
    width: int
    dims: int = 1

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...]) -> Place:
        """Describe a dense tensor.

        Args:
            shape: Its shape.
            stride: Its strides; only their order matters.
        """
        numel, width = 1, 1
        for size in shape:
            numel *= size
        inner_first = sorted((step, size) for size, step in zip(shape, stride, strict=True))
        for _, size in inner_first:
            if size != 1 and width < _MIN_WIDTH:
                width *= size
        if len(shape) < 2:
            width = numel
        return cls(numel, max(1, width), len(shape))

    @property
    def rows(self) -> int:
        """How often each column occurs, the last row counted whole."""
        return -(-self.numel // self.width)

    @property
    def num_blocks(self) -> int:
        """How many blocks of 128 elements there are, the last one counted whole."""
        return -(-self.numel // BLOCK_NUMEL)
