"""The step of Adam on packed state, in place of the user's own class."""

from __future__ import annotations

from typing import Any

import torch

from mt_lightning.optim.packed.formats import FORMATS
from mt_lightning.optim.packed.random import key
from mt_lightning.optim.packed.scalars import AdamScalars
from mt_lightning.optim.packed.update import adamw_step
from mt_lightning.optim.shadow import Hyper, Target
from mt_lightning.pages.packed import Packing


class PackedStepper:
    """Stands for a `torch.optim.AdamW`, `torch.optim.Adam` or `CompressedAdamW`.

    A parameter is updated as `CompressedAdamW` would update it, to the same bits.

    Args:
        optimizer: The user's optimizer; only its class and the shapes of its parameters are read.
        packings: How the state of each parameter is packed, in the order of the param groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, packings: list[Packing]) -> None:
        self._decoupled = isinstance(optimizer, torch.optim.AdamW)
        self._packings = packings

    def is_free(self, hyper: Hyper) -> bool:
        """See `Stepper.is_free`: its kernels have threads of their own."""
        del hyper
        return False

    @torch.no_grad()
    def step(self, hyper: Hyper, targets: list[Target]) -> list[dict[str, Any]]:
        """Step every target and return the state of each after it.

        Args:
            hyper: The frozen hyper-parameters.
            targets: 1-D slices that begin at a grain; the state of each holds `packed` and, once it
                has been stepped, `step`.
        """
        after = []
        for target in targets:
            group = hyper.groups[target.group]
            before = target.state.get("step")
            step = torch.zeros((), dtype=torch.float32) if before is None else before
            step = step + 1
            count, packing = int(step), self._packings[target.position]
            adamw_step(
                FORMATS[packing.format],
                target.param,
                target.grad,
                target.state["packed"],
                AdamScalars.of(group, count, group.get("decoupled_weight_decay", self._decoupled)),
                key=key(group.get("seed", 0), count, target.position),
                first=target.first,
                width=packing.width,
            )
            after.append({**target.state, "step": step})
        return after
