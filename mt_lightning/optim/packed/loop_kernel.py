"""One step of Adam as torch's loop over operations takes it, in one pass over memory.

[Note: operation by operation]
Without `fused=True` torch's Adam on a CPU is about ten operations, each of which goes through all
of its tensors: four times the traffic that the arithmetic needs. Here a stretch of 128 elements
goes through all of them while the processor's nearest cache holds it. They round as torch's do: a
multiplication is contracted with an addition in `lerp_`, `addcmul_` and `add(alpha=)`, nowhere
else, and roots are those of the library that torch takes them from.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from mt_lightning.optim.jit import jit
from mt_lightning.optim.packed.machine import behind, call_root, fma, prefetch, stack, wide

f32 = np.float32


@jit
def step_loop(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, constants, root, mode):
    """Take one step.

    Args:
        param: float32 [n]; updated.
        grad: float32 [n].
        exp_avg: float32 [n]; updated.
        exp_avg_sq: float32 [n]; updated.
        max_exp_avg_sq: float32 [n], that of amsgrad; updated. Empty without.
        constants: float32: decay of weights, 1 - b1 (below a half), b2, 1 - b2, -lr / (1 - b1^t),
            sqrt(1 - b2^t), eps, L2 decay, sign of g.
        root: Address of the function that takes roots, 0 for the processor's own.
        mode: Its last argument.
    """
    wide()
    decay, w1, b2, w2, rate = constants[0], constants[1], constants[2], constants[3], constants[4]
    root_scale, eps, l2, sign = constants[5], constants[6], constants[7], constants[8]
    amsgrad = len(max_exp_avg_sq) > 0
    g_start, d_start = stack(f32, 128), stack(f32, 128)
    d = carray(d_start, (128,), f32)
    for start in range(0, len(param), 128):
        n = min(128, len(param) - start)
        # The processor's own prefetching ends with each stretch.
        for j in range(start + 128, start + 256, 16):
            prefetch(behind(param, j))
            prefetch(behind(grad, j))
            prefetch(behind(exp_avg, j))
            prefetch(behind(exp_avg_sq, j))
        p = carray(behind(param, start), (n,), f32)
        m = carray(behind(exp_avg, start), (n,), f32)
        v = carray(behind(exp_avg_sq, start), (n,), f32)
        q_start = behind(grad, start)
        if l2 != f32(0) or sign != f32(1):
            q, g = carray(q_start, (n,), f32), carray(g_start, (n,), f32)
            for j in range(n):
                g[j] = q[j] * sign
            if l2 != f32(0):
                for j in range(n):
                    g[j] = fma(p[j], l2, g[j])
            q_start = g_start
        g = carray(q_start, (n,), f32)
        for j in range(n):
            x = g[j]
            v[j] = fma(w2 * x, x, v[j] * b2)
            d[j] = v[j]
            m[j] = fma(w1, x - m[j], m[j])
        if amsgrad:
            top = carray(behind(max_exp_avg_sq, start), (n,), f32)
            for j in range(n):
                # As in torch's maximum, NaN wins.
                top[j] = d[j] if top[j] < d[j] or d[j] != d[j] else top[j]
                d[j] = top[j]
        if root != 0:
            call_root(root, n, d_start, mode)
        else:
            for j in range(n):
                d[j] = np.sqrt(d[j])
        for j in range(n):
            p[j] = p[j] * decay + (rate * m[j]) / (d[j] / root_scale + eps)
