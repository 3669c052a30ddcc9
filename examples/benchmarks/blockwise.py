"""AdamW with 8-bit or 4-bit state, as other libraries keep it: what packed formats stand beside.

Both cut a tensor into blocks, divide each by its largest magnitude (a float32 per block), and
round each value to the nearest entry of a fixed map. The arithmetic between is plain AdamW in
float32; the update reads the moments before they are rounded. Tensors below 4096 elements stay
float32.

    kind    block  map of m                                    map of v
    8-bit    256   dynamic map: sign, 7 exponent bits at most   dynamic map without sign
    4-bit    128   dynamic map: sign, 3 exponent bits at most   linear, 1/16 to 1, no zero

Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021) and bitsandbytes
for 8 bits; B. Li et al., "Memory Efficient Optimizers with 4-bit States" (2023), as in torchao,
for 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_NUMEL = 4096
"""Below it a tensor keeps float32 state, in both libraries."""


def dynamic_map(*, signed: bool, exponent_bits: int, total_bits: int) -> Tensor:
    """Return the entries of a dynamic map, ascending: decades below 1, the upper ones split finer.

    Args:
        signed: Whether every entry is there with either sign.
        exponent_bits: Number of decades.
        total_bits: The map has two to this power of entries, 0 and 1 among them.
    """
    entries = [0.0, 1.0]
    for decade in range(exponent_bits):
        count = 2 ** (decade + total_bits - 1 - exponent_bits + (0 if signed else 1))
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - exponent_bits)
        entries += means.tolist()
        if signed:
            entries += (-means).tolist()
    assert len(entries) == 2**total_bits, len(entries)
    return torch.tensor(sorted(entries), dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Blockwise:
    """How one library keeps state.

    Attributes:
        block_numel: Values that share a scale.
        bits: Bits of a code.
        make_maps: Makes the map of m and that of v.
    """

    block_numel: int
    bits: int
    make_maps: Callable[[], tuple[Tensor, Tensor]]

    @property
    def bits_per_value(self) -> float:
        """Bits for each value, the float32 scale of the block included."""
        return self.bits + 32 / self.block_numel


EIGHT_BIT = Blockwise(
    block_numel=256,
    bits=8,
    make_maps=lambda: (
        dynamic_map(signed=True, exponent_bits=7, total_bits=8),
        dynamic_map(signed=False, exponent_bits=7, total_bits=8),
    ),
)
FOUR_BIT = Blockwise(
    block_numel=128,
    bits=4,
    make_maps=lambda: (
        dynamic_map(signed=True, exponent_bits=3, total_bits=4),
        torch.linspace(0, 1, 17)[1:],
    ),
)


def rounded(values: Tensor, entries: Tensor, block_numel: int) -> Tensor:
    """Return `values` (any shape) as they read after being stored in a map's codes."""
    flat = values.flatten()
    padding = -flat.numel() % block_numel
    blocks = torch.nn.functional.pad(flat, (0, padding)).view(-1, block_numel)
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
    middles = (entries[1:] + entries[:-1]) / 2
    nearest = entries[torch.bucketize(blocks / scale, middles, right=True)]
    return (nearest * scale).flatten()[: flat.numel()].view_as(values)


class BlockwiseAdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded to a map after every step.

    It keeps the rounded values as float32: what is shown is the arithmetic, not the memory.

    Args:
        params: Parameters, or param groups.
        kind: `EIGHT_BIT` or `FOUR_BIT`.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        kind: Blockwise,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._kind = kind
        self._maps = kind.make_maps()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)

    def _step(self, param: Tensor, group: dict) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        m = state["exp_avg"].lerp(param.grad, 1 - beta1)
        v = state["exp_avg_sq"].lerp(param.grad.square(), 1 - beta2)
        root = v.sqrt() / math.sqrt(1 - beta2 ** state["step"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] / (1 - beta1 ** state["step"])
        param.addcdiv_(m, root + group["eps"], value=-rate)
        if param.numel() >= MIN_NUMEL:
            m = rounded(m, self._maps[0], self._kind.block_numel)
            v = rounded(v, self._maps[1], self._kind.block_numel)
        state["exp_avg"], state["exp_avg_sq"] = m, v
