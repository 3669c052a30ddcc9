"""The optimizers that the benchmarks compare, by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from blockwise import EIGHT_BIT, FOUR_BIT, BlockwiseAdamW
from torch import Tensor

from mt_lightning.optim.compressed_adamw import CompressedAdamW
from mt_lightning.optim.packed.formats import FORMATS

BASELINE = "adamw"
"""torch's own AdamW with float32 state."""

BLOCKWISE = {"8-bit": EIGHT_BIT, "4-bit": FOUR_BIT}
"""State as bitsandbytes and torchao keep it."""


def packed_names() -> list[str]:
    """Return the packed formats, those that are not exact."""
    return [name for name, format in FORMATS.items() if not format.exact]


def bits_per_value(name: str) -> float | None:
    """Return the bits of each moment of an element; None where it depends on the tensor."""
    if name == BASELINE:
        return 32.0
    if name in BLOCKWISE:
        return BLOCKWISE[name].bits_per_value
    return FORMATS[name].bits_per_value if name in FORMATS else None


def make_optimizer(
    name: str,
    params: Iterable[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Return an optimizer.

    Args:
        name: "adamw", "8-bit", "4-bit", or a `format` of `CompressedAdamW`.
        params: What it steps.
        lr: Learning rate.
        betas: Decay of the two moments.
        weight_decay: Decoupled weight decay.
        seed: Of stochastic rounding, where there is any.
    """
    if name == BASELINE:
        return torch.optim.AdamW(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    if name in BLOCKWISE:
        return BlockwiseAdamW(
            params, BLOCKWISE[name], lr=lr, betas=betas, weight_decay=weight_decay
        )
    return CompressedAdamW(
        params, lr=lr, betas=betas, weight_decay=weight_decay, format=name, seed=seed
    )
