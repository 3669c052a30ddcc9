"""The model of these tests in plain numbers, as the simulator takes it."""

from __future__ import annotations

from .gpt import NUM_TOKENS
from .simulator import BLOCK_BYTES, Case, Sizes

SHARES = {"smallest": 0.0, "tight": 0.1, "middle": 0.4, "roomy": 0.7, "everything": 1.0}
"""Budgets: how far they lie from the smallest one to one in which everything fits."""

_FLOAT_BYTES = 4


def page(slice_bytes: int, *numels: int) -> Sizes:
    """Return the sizes of a page whose AdamW state is two copies of its weights.

    Each parameter begins at a multiple of 64 bytes; the page ends at the first multiple of 4096
    bytes behind them, and is updated in slices.
    """
    end = 0
    for numel in numels:
        end = -(-end // 64) * 64 + numel * _FLOAT_BYTES
    weight_bytes = (end // 4096 + 1) * 4096
    assert end % slice_bytes, "a slice without parameters would be written, but never read"
    return Sizes(
        weight_bytes=weight_bytes,
        grad_bytes=sum(numels) * _FLOAT_BYTES,
        chunk_bytes=tuple(
            2 * min(slice_bytes, weight_bytes - start)
            for start in range(0, weight_bytes, slice_bytes)
        ),
    )


def gpt_case(
    *,
    budget: str,
    depth: int,
    deferred: bool,
    micro_batches: int,
    width: int = 64,
    num_layers: int = 5,
    vocab: int = 300,
    slice_bytes: int = BLOCK_BYTES,
) -> Case:
    """Describe a run of `GPT` under one of the budgets of `SHARES`."""
    w = width
    block = page(slice_bytes, w, w, *(w * w, w) * 3, 4 * w * w, 4 * w, 4 * w * w, w)
    table = page(slice_bytes, vocab * w)
    sizes = {
        "units": (table, *[block] * num_layers, table),
        "resident": page(slice_bytes, NUM_TOKENS * w, w, w),
        "depth": depth,
        "deferred": deferred,
        "micro_batches": micro_batches,
        "input_bytes": (NUM_TOKENS * 8, *[NUM_TOKENS * w * _FLOAT_BYTES] * (num_layers + 1)),
    }
    probe = Case(budget_bytes=0, **sizes)
    low, high = probe.smallest_bytes, probe.everything_bytes
    return Case(budget_bytes=int(low + SHARES[budget] * (high - low)), **sizes)
