"""The constants of one Adam step, computed as torch's fused kernel computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class AdamScalars:
    """What one step of Adam depends on beside its tensors, in double.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root.
        weight_decay: Factor of the decay.
        step: Number of this step, from 1.
        decoupled: Whether weights decay by themselves (AdamW) or through the gradient (Adam).
        maximize: Whether to climb.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    maximize: bool = False

    @classmethod
    def of(cls, group: dict[str, Any], step: int, decoupled: bool) -> AdamScalars:
        """Take them from a param group.

        Args:
            group: Param group of an Adam; its values may be 0-D tensors.
            step: Number of this step, from 1.
            decoupled: Whether weight decay is AdamW's.
        """
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            decoupled=decoupled,
            maximize=bool(group.get("maximize", False)),
        )

    @cached_property
    def constants(self) -> np.ndarray:
        """The float32 constants of the kernels, in the order of their names below.

        decay, 1 - b1, b2, 1 - b2, -lr / (1 - b1^t), sqrt(1 - b2^t), its inverse, eps, L2 decay,
        sign of g.
        Each is computed in double and rounded once; note 1 - float32(b2) != float32(1 - b2).
        """
        decay = self.lr * self.weight_decay if self.decoupled else 0.0
        root_scale = math.sqrt(1 - math.pow(self.beta2, self.step))
        with np.errstate(over="ignore"):  # a rate beyond float32 is infinite, as in torch
            return np.array(
                [
                    1 - decay,
                    1 - self.beta1,
                    self.beta2,
                    1 - self.beta2,
                    -(self.lr / (1 - math.pow(self.beta1, self.step))),
                    root_scale,
                    1 / root_scale,
                    self.eps,
                    0.0 if self.decoupled else self.weight_decay,
                    -1.0 if self.maximize else 1.0,
                ],
                dtype=np.float32,
            )

    @cached_property
    def extra(self) -> np.ndarray:
        """Further float32 constants of panels: 1 / (1 - b2^t), (1 - b2) / (1 - b2^t), lim."""
        unbias = 1 / (1 - math.pow(self.beta2, self.step))
        limit = self.lr * max(1.0, (1 - self.beta1) / math.sqrt(1 - self.beta2))
        with np.errstate(over="ignore"):
            return np.array([unbias, self.column_weight, limit], dtype=np.float32)

    @property
    def column_weight(self) -> float:
        """Weight of this step in columns: (1 - b2) / (1 - b2^t), in double."""
        return (1 - self.beta2) / (1 - math.pow(self.beta2, self.step))
