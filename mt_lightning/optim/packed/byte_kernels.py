"""The compiled kernels of m8v8: an Adam step on records of bytes, and records to fp32 and back.

Arithmetic and bytes are those that records says, without contraction; the notes of kernels hold
here too, but for the batches: bytes need no packing.
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
    copy_bytes,
    float_of,
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
from mt_lightning.optim.packed.records import M8V8

f32, i32, u32, u8 = np.float32, np.int32, np.uint32, np.uint8

_SIZE = M8V8.record_bytes
_AHEAD = 1024
"""Elements from a block to the one that is fetched meanwhile."""

_BF16 = i32(-65536)
_BF16_MAX = i32(0x7F7F0000)
_TINY = f32(2.0**-126)
_TINY_V = f32(2.0**-110)

_M_SHIFT = i32(20)
_M_ZERO = i32((127 << 23) - (127 << 20))
"""Where the line through the bits of m's levels meets code 0."""
_M_OFFSET = i32((1 << 19) - (127 << 23) + (127 << 20))
_M_FLOOR = f32(1.125 * 2.0**-16)
"""Its code is 0."""

_V_SHIFT = i32(M8V8.level_shift)
_V_LOW = i32(M8V8.lowest_bits)
_V_TOP = i32(M8V8.num_levels - 1)
_V_LOWEST = f32(M8V8.lowest_level)
_V_DOWN = i32(32 - M8V8.level_shift)
_V_MASK = i32(-(1 << M8V8.level_shift - M8V8.draw_bits))
_V_OFFSET = i32((1 << M8V8.level_shift - M8V8.draw_bits - 1) - M8V8.lowest_bits)


@inlined
def _m_value(c, scale):
    """Return the value of an m code."""
    x = i32(c)
    magnitude = and32(x, i32(127))
    y = float_of(add32(shl32(magnitude, _M_SHIFT), _M_ZERO))
    y = y if magnitude != i32(0) else f32(0)
    return float_of(or32(bits_of(y), shl32(and32(x, i32(128)), i32(24)))) * scale


@inlined
def _v_level(k):
    """Return the level of a v code."""
    return float_of(add32(shl32(i32(k), _V_SHIFT), _V_LOW))


@inlined
def _m_scale_of(r):
    return float_of(or32(shl32(i32(r[256]), i32(16)), shl32(i32(r[257]), i32(24))))


@inlined
def _v_scale_of(r):
    low = or32(i32(r[258]), shl32(i32(r[259]), i32(8)))
    return float_of(or32(low, or32(shl32(i32(r[260]), i32(16)), shl32(i32(r[261]), i32(24)))))


@spliced
def _encode_block(m, v, m_top, v_top, key, index, spread, r):
    """Write the record of a block whose largest |m| and v have these bits."""
    m_scale = float_of(min(and32(add32(m_top, i32(0x8000)), _BF16), _BF16_MAX))
    m_scale = m_scale if m_scale >= _TINY else f32(0)
    v_scale = float_of(v_top)
    v_scale = v_scale if v_scale >= _TINY_V else f32(0)
    inverse = f32(1) / m_scale if m_scale > f32(0) else f32(0)
    for j in range(128):
        x = bits_of(m[j])
        y = float_of(and32(x, FRACTION)) * inverse
        c = sar32(add32(bits_of(max(y, _M_FLOOR)), _M_OFFSET), _M_SHIFT)
        r[j] = or32(c, and32(shr32(x, i32(24)), i32(128))) if c != i32(0) else i32(0)
    inverse = f32(1) / v_scale if v_scale > f32(0) else f32(0)
    # As in kernels: random bits decide the carry, and a value on its level stays there.
    origin = mul32(i32(index), GOLDEN)
    salt = salt_of(key, index)
    for j in range(128):
        carry = and32(shr32(draw(add32(origin, spread[j]), salt), _V_DOWN), _V_MASK)
        v_bits = bits_of(max(v[j] * inverse, _V_LOWEST))
        r[128 + j] = min(sar32(add32(add32(v_bits, _V_OFFSET), carry), _V_SHIFT), _V_TOP)
    for j in range(2):
        r[256 + j] = u8(shr32(bits_of(m_scale), i32(16 + 8 * j)))
    for j in range(4):
        r[258 + j] = u8(shr32(bits_of(v_scale), i32(8 * j)))


@jit
def step_bytes(param, grad, records, constants, kappa, key, first, numel):
    """Take one Adam step on whole blocks.

    Args:
        param: float32, 128 elements for each record; updated.
        grad: The same of the gradient.
        records: uint8, the records behind each other; updated.
        constants: `AdamScalars.constants`.
        kappa: float32 kappa^2 - 1.
        key: int32 key of the random bits.
        first: Index in its tensor of the first element, a multiple of 128.
        numel: Elements of the tensor among those of `param`; the rest are padding.
    """
    wide()
    decay, w1, b2, w2, rate = constants[0], constants[1], constants[2], constants[3], constants[4]
    inverse_root_scale, eps, l2, sign = constants[6], constants[7], constants[8], constants[9]
    m = carray(stack(f32, 128), (128,), f32)
    v = carray(stack(f32, 128), (128,), f32)
    g = carray(stack(f32, 128), (128,), f32)
    start = stack(u8, 320)
    r = carray(start, (_SIZE,), u8)
    spread = carray(stack(i32, 128), (128,), i32)
    for j in range(128):
        spread[j] = mul32(i32(j), GOLDEN)
    for block in range(len(param) // 128):
        at = block * 128
        p = carray(behind(param, at), (128,), f32)
        q = carray(behind(grad, at), (128,), f32)
        record = behind(records, block * _SIZE)
        copy_bytes(start, record, _SIZE)
        for line in range(8):
            prefetch(behind(param, at + _AHEAD + 16 * line))
            prefetch(behind(grad, at + _AHEAD + 16 * line))
        m_scale = _m_scale_of(r)
        v_scale = _v_scale_of(r) * b2
        load_grad(p, q, l2, sign, g)
        m_top = i32(0)
        v_top = u32(0)
        for j in range(128):
            m_old = _m_value(r[j], m_scale)
            v_old = _v_level(r[128 + j]) * v_scale
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
        if m_top < INFINITY and v_top < u32(INFINITY):
            _encode_block(m, v, m_top, i32(v_top), key, first + at, spread, r)
            copy_bytes(record, start, _SIZE)


@jit
def decode_bytes(records, exp_avg, exp_avg_sq):
    """Write the values of whole records to `exp_avg` and `exp_avg_sq`."""
    wide()
    start = stack(u8, 320)
    r = carray(start, (_SIZE,), u8)
    for block in range(len(exp_avg) // 128):
        m = carray(behind(exp_avg, block * 128), (128,), f32)
        v = carray(behind(exp_avg_sq, block * 128), (128,), f32)
        copy_bytes(start, behind(records, block * _SIZE), _SIZE)
        m_scale, v_scale = _m_scale_of(r), _v_scale_of(r)
        for j in range(128):
            m[j] = _m_value(r[j], m_scale)
        for j in range(128):
            v[j] = _v_level(r[128 + j]) * v_scale


@jit
def encode_bytes(exp_avg, exp_avg_sq, records, key, first):
    """Write the records of whole blocks; return how many could not be, for values unfit for Adam.

    Those are NaN, infinity and, in `exp_avg_sq`, what is below zero.
    """
    wide()
    m = carray(stack(f32, 128), (128,), f32)
    v = carray(stack(f32, 128), (128,), f32)
    start = stack(u8, 320)
    r = carray(start, (_SIZE,), u8)
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
        _encode_block(m, v, m_top, v_top, key, first + block * 128, spread, r)
        copy_bytes(behind(records, block * _SIZE), start, _SIZE)
    return num_unfit
