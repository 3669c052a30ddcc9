"""The compiled kernels for the columns of a panel: read its vectors, and move them after a step.

[Note: columns of a block]
What is needed of columns lies in a work space of four vectors, which are as long as the tensor is
wide and continue periodically for another 128. So the 128 columns of any block are neighbours
there, whatever the width.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from mt_lightning.optim.jit import jit
from mt_lightning.optim.packed.machine import (
    add32,
    and32,
    behind,
    bits_of,
    copy_bytes,
    float_of,
    inlined,
    stack,
    wide,
)

f32, f64, i32 = np.float32, np.float64, np.int32

_ONE = f32(1)
_LEAST_COLUMN = 2.0**-16

ROOT_OLD, COLS, INVERSE, ACC = 0, 1, 2, 3
"""The vectors of the work space: sqrt(cols_old), cols, 1 / sqrt(cols), acc."""


@inlined
def to_24_bits(x):
    """Round a positive float to 16 bits behind the first one."""
    return float_of(and32(add32(bits_of(x), i32(0x80)), i32(-256)))


@jit
def prepare(vectors, work, width):
    """Fill the work space of a panel.

    Args:
        vectors: uint8: the bytes of cols_old and cols.
        work: float32 [4 * (width + 128)].
        width: Columns.
    """
    wide()
    row = width + 128
    for part in range(2):
        copy_bytes(behind(work, row * part), behind(vectors, 4 * width * part), 4 * width)
    root_old, cols = carray(behind(work, 0), (row,), f32), carray(behind(work, row), (row,), f32)
    inverse, acc = (
        carray(behind(work, 2 * row), (row,), f32),
        carray(behind(work, 3 * row), (row,), f32),
    )
    for j in range(width):
        old = root_old[j]
        root_old[j] = np.sqrt(old if old != f32(0) else _ONE)
    for j in range(width):
        new = cols[j]
        cols[j] = new if new != f32(0) else _ONE
    for j in range(width):
        inverse[j] = _ONE / np.sqrt(cols[j])
    for j in range(width, row):
        root_old[j] = root_old[j - width]
        cols[j] = cols[j - width]
        inverse[j] = inverse[j - width]
    for j in range(row):
        acc[j] = f32(0)


@jit
def fold(vectors, work, width, column, numel, rho):
    """Move the columns of a panel by what its blocks have added up, and write both vectors.

    Args:
        vectors: uint8: the bytes of cols_old and cols; updated.
        work: float32 [4 * (width + 128)], as the blocks have left it; used up.
        width: Columns.
        column: That of the first element.
        numel: Elements of the panel.
        rho: float64 weight of this step.
    """
    wide()
    size = 4 * width
    row = width + 128
    cols, acc = carray(behind(work, row), (row,), f32), carray(behind(work, 3 * row), (row,), f32)
    for j in range(width, width + 128):
        acc[j % width] += acc[j]
    least, rest = numel // width, numel % width
    often = 1.0 / (least + 1)
    seldom = 1.0 / least if least > 0 else 0.0
    lanes = carray(stack(f64, 8), (8,), f64)
    even = width // 8 * 8

    for lane in range(8):
        lanes[lane] = 0.0
    for begin in range(0, even, 8):
        for lane in range(8):
            lanes[lane] += _share(acc, begin + lane, column, width, rest, often, seldom)
    for j in range(even, width):
        lanes[j - even] += _share(acc, j, column, width, rest, often, seldom)
    mean = _sum8(lanes) / width
    if not mean > 0.0:
        copy_bytes(behind(vectors, 0), behind(vectors, size), size)
        return
    scale = 1.0 / mean

    if (vectors[size] | vectors[size + 1] | vectors[size + 2] | vectors[size + 3]) == 0:
        rho = 1.0
    for lane in range(8):
        lanes[lane] = 0.0
    for begin in range(0, even, 8):
        for lane in range(8):
            f = _share(acc, begin + lane, column, width, rest, often, seldom) * scale
            lanes[lane] += _moved(f64(cols[begin + lane]), f, rho)
    for j in range(even, width):
        f = _share(acc, j, column, width, rest, often, seldom) * scale
        lanes[j - even] += _moved(f64(cols[j]), f, rho)
    scale_after = 1.0 / (_sum8(lanes) / width)

    copy_bytes(behind(vectors, 0), behind(cols, 0), size)
    for j in range(width):
        f = _share(acc, j, column, width, rest, often, seldom) * scale
        cols[j] = to_24_bits(f32(_moved(f64(cols[j]), f, rho) * scale_after))
    copy_bytes(behind(vectors, size), behind(cols, 0), size)


@inlined
def _share(acc, j, column, width, rest, often, seldom):
    """Return `acc[j]` over how many elements of the panel are in column j."""
    behind_first = j - column if j >= column else j - column + width
    return f64(acc[j]) * (often if behind_first < rest else seldom)


@inlined
def _moved(old, f, rho):
    """Return a column after this step, before it is scaled."""
    return max(old + rho * (f - old), _LEAST_COLUMN)


@inlined
def _sum8(lanes):
    total = lanes[0]
    for lane in range(1, 8):
        total += lanes[lane]
    return total
