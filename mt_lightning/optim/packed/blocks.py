"""What the kernels of every packed format do with a block of 128 elements."""

from __future__ import annotations

import numpy as np

from mt_lightning.optim.packed.machine import and32, bits_of, spliced

f32, i32 = np.float32, np.int32

FRACTION = i32(0x7FFFFFFF)
"""All bits of a float but its sign."""

INFINITY = i32(0x7F800000)
"""Bits of infinity; those of NaN are above."""


@spliced
def load_grad(p, q, l2, sign, g):
    """Write the gradient `q` to `g`, with the sign of `maximize` and Adam's own weight decay."""
    if l2 != f32(0) or sign != f32(1):
        for j in range(128):
            g[j] = q[j] * sign
        if l2 != f32(0):
            for j in range(128):
                g[j] = g[j] + p[j] * l2
    else:
        for j in range(128):
            g[j] = q[j]


@spliced
def load_moments(m_in, v_in, m, v):
    """Copy both moments.

    Returns:
        Bits of the largest |m| and of the largest v; whether Adam can have such moments: finite,
        and no v below zero.
    """
    m_top = i32(0)
    v_top = i32(0)
    v_least = i32(0)
    for j in range(128):
        m[j] = m_in[j]
        v[j] = v_in[j] + f32(0)  # turns -0 into 0
        m_top = max(m_top, and32(bits_of(m[j]), FRACTION))
        v_top = max(v_top, bits_of(v[j]))
        v_least = min(v_least, bits_of(v[j]))
    return m_top, v_top, m_top < INFINITY and v_top < INFINITY and v_least >= i32(0)
