"""The compiled kernels of panels: an Adam step on format C5, and its state to fp32 and back.

Arithmetic, bytes and order of sums are those that panels says, without contraction; the notes of
kernels hold here too.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from mt_lightning.optim.jit import jit
from mt_lightning.optim.packed.blocks import FRACTION, INFINITY, load_grad
from mt_lightning.optim.packed.machine import (
    add32,
    and32,
    behind,
    bits_of,
    float_of,
    inlined,
    lane_sum,
    or32,
    prefetch,
    shl32,
    shr32,
    stack,
    wide,
)
from mt_lightning.optim.packed.packing import join_signed, split_signed
from mt_lightning.optim.packed.panel_columns import ACC, COLS, INVERSE, ROOT_OLD, to_24_bits
from mt_lightning.optim.packed.panels import C5, KAPPA_SQUARED

f32, i32, u8, i8 = np.float32, np.int32, np.uint8, np.int8

_BATCH = 8
_SIZE = C5.record_bytes
_KAPPA = f32(KAPPA_SQUARED)
_ONE = f32(1)
_TOP = f32(15)
_MAGIC = f32(3 << 22)
"""Added to a small float, it rounds it to an integer, which is then in the lowest bits."""
_CAP = f32(4096)
_TINY = f32(2.0**-126)
_SMALL = f32(2.0**-100)
_LARGE = f32(2.0**100)
_HUGE = f32(2.0**119)
"""128 of it have a sum."""


@inlined
def _columns_sum(cols, tail, num_valid):
    """Return the sum of the first `num_valid` of a block's columns."""
    if num_valid >= 128:
        return lane_sum(behind(cols, 0))
    for j in range(128):
        tail[j] = cols[j] if j < num_valid else f32(0)
    return lane_sum(behind(tail, 0))


@inlined
def _a_of(r):
    return float_of(or32(shl32(i32(r[80]), i32(16)), shl32(i32(r[81]), i32(24))))


@inlined
def _s_of(r):
    low = or32(shl32(i32(r[82]), i32(8)), shl32(i32(r[83]), i32(16)))
    return float_of(or32(low, shl32(i32(r[84]), i32(24))))


@inlined
def _write_scales(r, a, s):
    a_bits, s_bits = bits_of(a), bits_of(s)
    r[80], r[81] = u8(shr32(a_bits, i32(16))), u8(shr32(a_bits, i32(24)))
    for j in range(3):
        r[82 + j] = u8(shr32(s_bits, i32(8 * j + 8)))


@inlined
def _scale_of_m(top):
    """Return a of a block whose largest |y| is `top`."""
    a = float_of(and32(add32(bits_of(top / _TOP), i32(0x8000)), i32(-65536)))
    return a if a >= _SMALL else f32(0)


@inlined
def _scale_of_v(mean):
    s = to_24_bits(mean)
    return s if s >= _TINY else f32(0)


@inlined
def _inverse(x, least):
    return _ONE / x if x >= least else f32(0)


@inlined
def _code(y, inverse):
    return i8(bits_of(y * inverse + _MAGIC))


@jit
def step_blocks(param, grad, records, work, width, column, constants, extra, numel):
    """Take one Adam step on whole blocks, and add to acc.

    Args:
        param: float32, 128 elements for each record; updated.
        grad: The same of the gradient.
        records: uint8, the records behind each other; updated.
        work: float32 [4 * (width + 128)], from `panel_columns.prepare`.
        width: Columns.
        column: That of the first element.
        constants: `AdamScalars.constants`.
        extra: `AdamScalars.extra`.
        numel: Elements of the tensor among those of `param`; the rest are padding.
    """
    wide()
    decay, w1, b2, w2, rate = constants[0], constants[1], constants[2], constants[3], constants[4]
    eps, l2, sign = constants[7], constants[8], constants[9]
    unbias, w2_unbiased, limit = extra[0], extra[1], extra[2]
    h_factor = _KAPPA * b2 * unbias
    g = carray(stack(f32, 128), (128,), f32)
    tail = carray(stack(f32, 128), (128,), f32)
    y_start, gg_start, c_start = stack(f32, 1024), stack(f32, 1024), stack(i8, 1024)
    k_of = carray(stack(f32, 8), (8,), f32)
    a_of = carray(stack(f32, 8), (8,), f32)
    s_of = carray(stack(f32, 8), (8,), f32)
    top_of = carray(stack(f32, 8), (8,), f32)
    row = width + 128
    num_blocks = len(param) // 128
    for begin in range(0, num_blocks, _BATCH):
        count = min(_BATCH, num_blocks - begin)
        for i in range(count):
            at = (begin + i) * 128
            start = behind(records, (begin + i) * _SIZE)
            split_signed(start, behind(c_start, 128 * i))
            r = carray(start, (_SIZE,), u8)
            valid = min(128, numel - at)
            cols = carray(behind(work, COLS * row + (column + at) % width), (128,), f32)
            a_of[i], s_of[i] = _a_of(r), _s_of(r)
            k_of[i] = s_of[i] * (f32(valid) / _columns_sum(cols, tail, valid))
        for i in range(count):
            at = (begin + i) * 128
            first = (column + at) % width
            p = carray(behind(param, at), (128,), f32)
            q = carray(behind(grad, at), (128,), f32)
            c = carray(behind(c_start, 128 * i), (128,), i8)
            y = carray(behind(y_start, 128 * i), (128,), f32)
            gg = carray(behind(gg_start, 128 * i), (128,), f32)
            root_old = carray(behind(work, ROOT_OLD * row + first), (128,), f32)
            cols = carray(behind(work, COLS * row + first), (128,), f32)
            inverse = carray(behind(work, INVERSE * row + first), (128,), f32)
            for line in range(8):
                prefetch(behind(param, at + _BATCH * 128 + 16 * line))
                prefetch(behind(grad, at + _BATCH * 128 + 16 * line))
            a, h = a_of[i], h_factor * k_of[i]
            load_grad(p, q, l2, sign, g)
            top = i32(0)
            for j in range(128):
                m_old = (f32(c[j]) * a) * root_old[j]
                m_new = m_old + w1 * (g[j] - m_old)
                square = g[j] * g[j]
                root = np.sqrt(h * cols[j] + w2_unbiased * square)
                x = (rate * m_new) / (root + eps)
                x = limit if x > limit else x
                x = -limit if x < -limit else x
                p[j] = p[j] * decay + x
                y[j] = m_new * inverse[j]
                gg[j] = square
                top = max(top, and32(bits_of(y[j]), FRACTION))
            top_of[i] = float_of(top)
        for i in range(count):
            valid = min(128, numel - (begin + i) * 128)
            mean = lane_sum(behind(gg_start, 128 * i)) / f32(valid)
            mean = b2 * s_of[i] + w2 * mean
            if not (top_of[i] <= _LARGE and mean <= _LARGE):
                top_of[i] = f32(-1)
                continue
            a_of[i], s_of[i] = _scale_of_m(top_of[i]), _scale_of_v(mean)
        for i in range(count):
            if top_of[i] < f32(0):
                continue
            first = (column + (begin + i) * 128) % width
            c = carray(behind(c_start, 128 * i), (128,), i8)
            y = carray(behind(y_start, 128 * i), (128,), f32)
            gg = carray(behind(gg_start, 128 * i), (128,), f32)
            acc = carray(behind(work, ACC * row + first), (128,), f32)
            inverse_a = _inverse(a_of[i], _SMALL)
            inverse_s = _inverse(s_of[i] * unbias, _SMALL)
            for j in range(128):
                c[j] = _code(y[j], inverse_a)
            for j in range(128):
                part = gg[j] * inverse_s
                acc[j] += part if part < _CAP else _CAP
        for i in range(count):
            if top_of[i] >= f32(0):
                start = behind(records, (begin + i) * _SIZE)
                join_signed(behind(c_start, 128 * i), start)
                _write_scales(carray(start, (_SIZE,), u8), a_of[i], s_of[i])


@jit
def decode_blocks(records, work, width, column, exp_avg, exp_avg_sq, numel):
    """Write the values of whole records to `exp_avg` and `exp_avg_sq`.

    Args:
        records: uint8, the records behind each other.
        work: float32 [4 * (width + 128)], from `panel_columns.prepare`.
        width: Columns.
        column: That of the first element.
        exp_avg: float32, 128 elements for each record.
        exp_avg_sq: The same.
        numel: Elements of the tensor among those; the rest are padding.
    """
    wide()
    c_start = stack(i8, 128)
    c = carray(c_start, (128,), i8)
    tail = carray(stack(f32, 128), (128,), f32)
    row = width + 128
    for block in range(len(exp_avg) // 128):
        first = (column + block * 128) % width
        m = carray(behind(exp_avg, block * 128), (128,), f32)
        v = carray(behind(exp_avg_sq, block * 128), (128,), f32)
        root_old = carray(behind(work, ROOT_OLD * row + first), (128,), f32)
        cols = carray(behind(work, COLS * row + first), (128,), f32)
        start = behind(records, block * _SIZE)
        r = carray(start, (_SIZE,), u8)
        split_signed(start, c_start)
        valid = min(128, numel - block * 128)
        a, k = _a_of(r), _s_of(r) * (f32(valid) / _columns_sum(cols, tail, valid))
        for j in range(128):
            m[j] = (f32(c[j]) * a) * root_old[j]
        for j in range(128):
            v[j] = k * cols[j]


@jit
def fit_blocks(exp_avg_sq, work, width, column, numel):
    """Add to acc v over k of every block, so that columns can be fitted to v.

    Blocks of values that are unfit for Adam add nothing. Arguments are those of `decode_blocks`.
    """
    wide()
    v = carray(stack(f32, 128), (128,), f32)
    tail = carray(stack(f32, 128), (128,), f32)
    row = width + 128
    for block in range(len(exp_avg_sq) // 128):
        first = (column + block * 128) % width
        source = carray(behind(exp_avg_sq, block * 128), (128,), f32)
        cols = carray(behind(work, COLS * row + first), (128,), f32)
        acc = carray(behind(work, ACC * row + first), (128,), f32)
        valid = min(128, numel - block * 128)
        mean = _mean_of(source, v, valid)
        if mean >= f32(0):
            inverse_k = _inverse(mean, _SMALL) * (_columns_sum(cols, tail, valid) / f32(valid))
            for j in range(128):
                acc[j] += v[j] * inverse_k


@inlined
def _mean_of(source, v, num_valid):
    """Copy v of a block, huge values cut, and return its mean; -1 if any value is unfit."""
    top = i32(0)
    least = i32(0)
    for j in range(128):
        x = source[j] + f32(0)  # turns -0 into 0
        top = max(top, bits_of(x))
        least = min(least, bits_of(x))
        v[j] = min(x, _HUGE)
    if top >= INFINITY or least < i32(0):
        return f32(-1)
    return lane_sum(behind(v, 0)) / f32(num_valid)


@jit
def encode_blocks(exp_avg, exp_avg_sq, records, work, width, column, numel):
    """Write the records of whole blocks; return how many could not be, for values unfit for Adam.

    Those are NaN, infinity and, in `exp_avg_sq`, what is below zero. Arguments are those of
    `decode_blocks`.
    """
    wide()
    c_start = stack(i8, 128)
    c = carray(c_start, (128,), i8)
    y = carray(stack(f32, 128), (128,), f32)
    v = carray(stack(f32, 128), (128,), f32)
    num_unfit = 0
    row = width + 128
    for block in range(len(exp_avg) // 128):
        first = (column + block * 128) % width
        m = carray(behind(exp_avg, block * 128), (128,), f32)
        source = carray(behind(exp_avg_sq, block * 128), (128,), f32)
        root_old = carray(behind(work, ROOT_OLD * row + first), (128,), f32)
        mean = _mean_of(source, v, min(128, numel - block * 128))
        top = i32(0)
        m_top = i32(0)
        for j in range(128):
            m_top = max(m_top, and32(bits_of(m[j]), FRACTION))
            x = m[j] / root_old[j]
            x = min(max(x, -_LARGE), _LARGE)
            y[j] = x
            top = max(top, and32(bits_of(x), FRACTION))
        if mean < f32(0) or m_top >= INFINITY:
            num_unfit += 1
            continue
        a, s = _scale_of_m(float_of(top)), _scale_of_v(min(mean, _LARGE))
        inverse_a = _inverse(a, _SMALL)
        for j in range(128):
            c[j] = _code(y[j], inverse_a)
        start = behind(records, block * _SIZE)
        join_signed(c_start, start)
        _write_scales(carray(start, (_SIZE,), u8), a, s)
    return num_unfit
