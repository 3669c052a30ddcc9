"""The compiled kernels: one Adam step on records, and records to fp32 and back.

[Note: no contraction]
Kernels of packed formats are compiled without fast-math: no multiplication is contracted with an
addition and nothing is reordered, so results are the same for every vector width. They work on
whole blocks only and no block depends on another, so they are also the same for every cut of a
tensor at multiples of 128 and every order of the pieces. The fp32 kernel contracts exactly where
torch's fused kernel does.

[Note: batches]
Blocks are taken 8 at a time: unpack all codes into bytes, step and encode block by block, pack all
codes. Packing reads bytes at odd distances; right behind the stores that wrote them such reads
would stall the processor, a batch later they do not.

[Note: what is not finite]
Largest values are found by comparing bits as integers, where NaN and infinity come last. Where one
is found, the record stays as it was; the weights have been written as the formula gives.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from mt_lightning.optim.jit import jit
from mt_lightning.optim.packed.blocks import FRACTION, INFINITY, load_grad, load_moments
from mt_lightning.optim.packed.draws import GOLDEN, draw, salt_of
from mt_lightning.optim.packed.machine import (
    add32,
    and32,
    behind,
    bits_of,
    float_of,
    fma,
    inlined,
    mul32,
    or32,
    prefetch,
    sar32,
    shl32,
    shr32,
    spliced,
    stack,
    wide,
)
from mt_lightning.optim.packed.packing import (
    join_nibbles,
    join_pairs,
    join_sixes,
    join_third_bits,
    split_nibbles,
    split_pairs,
    split_sixes,
    split_third_bits,
)
from mt_lightning.optim.packed.records import M4V4, R1, R2

f32, i32, u32, u8 = np.float32, np.int32, np.uint32, np.uint8

# numba optimises a function before it hands it to a caller. Loops must not go through that alone:
# they would be made into vectors without knowing that the caller's buffers do not overlap.

_BATCH = 8
"""Blocks in a batch."""

_STRIDE = 144
"""Bytes between the v codes of two blocks of a batch; slot 128 of R1 is behind the last code."""

_M4V4, _R2, _R1 = M4V4.code, R2.code, R1.code
_ONE = i32(127 << 23)
_TINY = f32(2.0**-126)
_BF16 = i32(-65536)
_KEEP = i32(-1)
"""In place of scales: the record stays as it is."""


@spliced
def _unpack(r, code, c, k):
    """Spread the codes of record `r` into bytes: `c` of m and `k` of v."""
    split_nibbles(r, c)
    v_codes = behind(r, 64)
    if code == _R1:
        split_sixes(v_codes, k)
    elif code == _M4V4:
        split_nibbles(v_codes, k)
    else:
        split_pairs(v_codes, k)
        if code == _R2:
            split_third_bits(behind(r, 96), k)


@spliced
def _pack(c, k, scales, code, size, r):
    """Write record `r` of a block: codes as bytes, and the bits of both bfloat16 scales."""
    join_nibbles(c, r)
    v_codes = behind(r, 64)
    if code == _R1:
        carray(k, (129,), u8)[128] = 0
        join_sixes(k, v_codes)
    elif code == _M4V4:
        join_nibbles(k, v_codes)
    else:
        join_pairs(k, v_codes)
        if code == _R2:
            join_third_bits(k, behind(r, 96))
    tail = carray(behind(r, size - 4), (4,), u8)
    for j in range(4):
        tail[j] = u8(shr32(scales, i32(8 * j)))


@inlined
def _scale_of(record, at):
    """Return the scale whose bfloat16 lies at byte `at`."""
    return float_of(or32(shl32(i32(record[at]), i32(16)), shl32(i32(record[at + 1]), i32(24))))


@inlined
def _decode_m(c, scale):
    """Return the value of an m code."""
    x = i32(c)
    y = float_of(add32(shl32(and32(x, i32(7)), i32(22)), i32(126 << 23)))  # right from 1 upwards
    y = min(y, y + (y - f32(1)))
    return float_of(or32(bits_of(y), shl32(and32(x, i32(8)), i32(28)))) * scale


@inlined
def _level(k, shift, low):
    """Return the level of a v code."""
    return float_of(add32(shl32(i32(k), shift), low))


@inlined
def _scales(m_top, v_top, code):
    """Return the scales of a block whose largest |m| and v have these bits."""
    m_scale = float_of(and32(bits_of(float_of(m_top) / f32(6)), _BF16))
    v_scale = float_of(v_top)
    if code == _M4V4:
        v_scale = v_scale / f32(1.5)
    v_scale = float_of(and32(bits_of(v_scale), _BF16))
    if m_scale < _TINY:
        m_scale = f32(0)
    if v_scale < _TINY:
        v_scale = f32(0)
    return m_scale, v_scale


@inlined
def _joined(m_scale, v_scale):
    """Return the bits of both scales as they lie in a record."""
    return or32(shr32(bits_of(m_scale), i32(16)), bits_of(v_scale))


@spliced
def _encode_block(m, v, m_scale, v_scale, fmt, key, index, spread, c, k):
    """Write the codes of one block to bytes of `c` and `k`; `v` is used up."""
    inverse = f32(1) / m_scale if m_scale > f32(0) else f32(0)
    for j in range(128):
        x = bits_of(m[j])
        y = float_of(and32(x, FRACTION)) * inverse  # at most 6.05: the scale was cut
        # Codes are linear in bits from 1 upwards; what is below is moved into [1/2, 1) and is, too.
        y = max(y, f32(0.5) * y + f32(0.5))
        m_code = sar32(add32(bits_of(y), i32((1 << 21) - (252 << 22))), i32(22))
        c[j] = or32(m_code, and32(shr32(x, i32(28)), i32(8))) if m_code != i32(0) else i32(0)
    inverse = f32(1) / v_scale if v_scale > f32(0) else f32(0)
    shift, low, top = fmt[1], fmt[2], fmt[3]
    lowest = float_of(low)
    if shift == i32(24):
        # A level spans two octaves: make v linear in its bits between levels.
        for j in range(128):
            x = bits_of(max(v[j] * inverse, lowest))
            rest = and32(add32(x, -low), i32((1 << 24) - 1))
            above = float_of(add32(rest, _ONE)) - f32(1)
            v[j] = float_of(add32(add32(x, -rest), i32(above * f32((1 << 24) / 3))))
        inverse = f32(1)
    # The code is the top bits of v; random bits below them decide the carry. The lowest of these
    # are constant instead: a value on its level, give or take some roundings, stays there.
    down = add32(i32(32), -shift)
    mask = -shl32(i32(1), add32(shift, i32(-16)))
    offset = add32(shl32(i32(1), add32(shift, i32(-17))), -low)
    origin = mul32(i32(index), GOLDEN)
    salt = salt_of(key, index)
    for j in range(128):
        carry = and32(shr32(draw(add32(origin, spread[j]), salt), down), mask)
        v_bits = bits_of(max(v[j] * inverse, lowest))
        k[j] = min(sar32(add32(add32(v_bits, offset), carry), shift), top)


@jit
def step_packed(param, grad, records, size, constants, fmt, kappa, key, first, numel):
    """Take one Adam step on whole blocks.

    Args:
        param: float32, 128 elements for each record; updated.
        grad: The same of the gradient.
        records: uint8, the records behind each other; updated.
        size: Bytes of a record.
        constants: `AdamScalars.constants`.
        fmt: int32: code, level shift, float bits of level 0, last level.
        kappa: float32 kappa^2 - 1.
        key: int32 key of the random bits.
        first: Index in its tensor of the first element, a multiple of 128.
        numel: Elements of the tensor among those of `param`; the rest are padding.
    """
    wide()
    decay, w1, b2, w2, rate = constants[0], constants[1], constants[2], constants[3], constants[4]
    inverse_root_scale, eps, l2, sign = constants[6], constants[7], constants[8], constants[9]
    code, shift, low = fmt[0], fmt[1], fmt[2]
    m = carray(stack(f32, 128), (128,), f32)
    v = carray(stack(f32, 128), (128,), f32)
    g = carray(stack(f32, 128), (128,), f32)
    c_start, k_start = stack(u8, 1024), stack(u8, 1152)
    scales = carray(stack(i32, 8), (8,), i32)
    spread = carray(stack(i32, 128), (128,), i32)
    for j in range(128):
        spread[j] = mul32(i32(j), GOLDEN)
    num_blocks = len(param) // 128
    for begin in range(0, num_blocks, _BATCH):
        count = min(_BATCH, num_blocks - begin)
        for i in range(count):
            r = behind(records, (begin + i) * size)
            _unpack(r, code, behind(c_start, 128 * i), behind(k_start, _STRIDE * i))
        for i in range(count):
            at = (begin + i) * 128
            p = carray(behind(param, at), (128,), f32)
            q = carray(behind(grad, at), (128,), f32)
            r = carray(behind(records, (begin + i) * size), (size,), u8)
            c = carray(behind(c_start, 128 * i), (128,), u8)
            k = carray(behind(k_start, _STRIDE * i), (128,), u8)
            for line in range(8):
                prefetch(behind(param, at + _BATCH * 128 + 16 * line))
                prefetch(behind(grad, at + _BATCH * 128 + 16 * line))
            m_scale = _scale_of(r, size - 4)
            v_scale = _scale_of(r, size - 2) * b2
            load_grad(p, q, l2, sign, g)
            m_top = i32(0)
            v_top = u32(0)
            for j in range(128):
                m_old = _decode_m(c[j], m_scale)
                v_old = _level(k[j], shift, low) * v_scale
                m_new = m_old + w1 * (g[j] - m_old)
                v_new = v_old + (w2 * g[j]) * g[j]
                m[j] = m_new
                v[j] = v_new
                root = np.sqrt(v_new + kappa * v_old) * inverse_root_scale
                p[j] = p[j] * decay + (rate * m_new) / (root + eps)
                m_top = max(m_top, and32(bits_of(m_new), FRACTION))
                v_top = max(v_top, u32(bits_of(v_new)))
            for j in range(numel - at, 128):
                v[j] = f32(0)
            scales[i] = _KEEP
            if m_top < INFINITY and v_top < u32(INFINITY):
                m_scale, v_scale = _scales(m_top, i32(v_top), code)
                scales[i] = _joined(m_scale, v_scale)
                _encode_block(m, v, m_scale, v_scale, fmt, key, first + at, spread, c, k)
        for i in range(count):
            if scales[i] != _KEEP:
                r = behind(records, (begin + i) * size)
                c_at, k_at = behind(c_start, 128 * i), behind(k_start, _STRIDE * i)
                _pack(c_at, k_at, scales[i], code, size, r)


@jit
def decode_packed(records, size, fmt, exp_avg, exp_avg_sq):
    """Write the values of whole records to `exp_avg` and `exp_avg_sq`."""
    wide()
    code, shift, low = fmt[0], fmt[1], fmt[2]
    c_start = stack(u8, 128)
    k_start = stack(u8, 192)
    c = carray(c_start, (128,), u8)
    k = carray(k_start, (128,), u8)
    for block in range(len(exp_avg) // 128):
        m = carray(behind(exp_avg, block * 128), (128,), f32)
        v = carray(behind(exp_avg_sq, block * 128), (128,), f32)
        start = behind(records, block * size)
        r = carray(start, (size,), u8)
        _unpack(start, code, c_start, k_start)
        m_scale = _scale_of(r, size - 4)
        v_scale = _scale_of(r, size - 2)
        for j in range(128):
            m[j] = _decode_m(c[j], m_scale)
        for j in range(128):
            v[j] = _level(k[j], shift, low) * v_scale


@jit
def encode_packed(exp_avg, exp_avg_sq, records, size, fmt, key, first):
    """Write the records of whole blocks; return how many could not be, for values unfit for Adam.

    Those are NaN, infinity and, in `exp_avg_sq`, what is below zero.
    """
    wide()
    code = fmt[0]
    m = carray(stack(f32, 128), (128,), f32)
    v = carray(stack(f32, 128), (128,), f32)
    c_start = stack(u8, 128)
    k_start = stack(u8, 192)
    c = carray(c_start, (128,), u8)
    k = carray(k_start, (128,), u8)
    spread = carray(stack(i32, 128), (128,), i32)
    for j in range(128):
        spread[j] = mul32(i32(j), GOLDEN)
    num_unfit = 0
    for block in range(len(exp_avg) // 128):
        m_in = carray(behind(exp_avg, block * 128), (128,), f32)
        v_in = carray(behind(exp_avg_sq, block * 128), (128,), f32)
        m_top, v_top, fit = load_moments(m_in, v_in, m, v)
        if not fit:
            num_unfit += 1
            continue
        m_scale, v_scale = _scales(m_top, v_top, code)
        _encode_block(m, v, m_scale, v_scale, fmt, key, first + block * 128, spread, c, k)
        start = behind(records, block * size)
        _pack(c_start, k_start, _joined(m_scale, v_scale), code, size, start)
    return num_unfit


@jit
def step_fp32(param, grad, records, constants):
    """Take the step of torch's fused kernel on whole blocks.

    Args:
        param: float32, 128 elements for each record; updated.
        grad: The same of the gradient.
        records: float32: 128 of m and 128 of v for each block; updated.
        constants: `AdamScalars.constants`.
    """
    wide()
    decay, w1, b2, w2, rate = constants[0], constants[1], constants[2], constants[3], constants[4]
    root_scale, eps, l2, sign = constants[5], constants[7], constants[8], constants[9]
    # torch interpolates from the nearer end.
    from_m = abs(w1) < f32(0.5)
    weight = w1 if from_m else w1 - f32(1)
    g = carray(stack(f32, 128), (128,), f32)
    for block in range(len(param) // 128):
        p = carray(behind(param, block * 128), (128,), f32)
        q = carray(behind(grad, block * 128), (128,), f32)
        m = carray(behind(records, block * 256), (128,), f32)
        v = carray(behind(records, block * 256 + 128), (128,), f32)
        if l2 != f32(0):
            for j in range(128):
                g[j] = fma(p[j], l2, q[j] * sign)
        else:
            for j in range(128):
                g[j] = q[j] * sign
        for j in range(128):
            m[j] = fma(weight, g[j] - m[j], m[j] if from_m else g[j])
            v[j] = fma(w2 * g[j], g[j], v[j] * b2)
            root = np.sqrt(v[j]) / root_scale
            p[j] = p[j] * decay + (rate * m[j]) / (root + eps)
