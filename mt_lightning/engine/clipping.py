"""How the gradients of each optimizer are clipped at its next step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mt_lightning.errors import StepError
from mt_lightning.optim.norm import Clip, clip_coefficient, total_norm


class Clipping:
    """Keeps what was asked for until the optimizer steps.

    Attributes:
        last_norm: Total norm before clipping of the last gradients clipped by norm, None at first.
    """

    def __init__(self) -> None:
        self.last_norm: float | None = None
        self._clips: dict[int, Clip] = {}
        self._unscale: dict[int, float] = {}

    def by_norm(
        self,
        optimizer: int,
        max_norm: float,
        norms: list[torch.Tensor],
        dtypes: list[torch.dtype],
    ) -> torch.Tensor:
        """Scale gradients, of these norms and dtypes, to a norm of `max_norm` at most.

        Returns:
            Their total norm.

        Raises:
            StepError: They are clipped already.
        """
        norm = total_norm([self.unscaled(optimizer, norm) for norm in norms], dtypes)
        if norms:
            self._set(optimizer, Clip(coefficient=clip_coefficient(float(max_norm), norm)))
        self.last_norm = float(norm)
        return norm

    def by_value(self, optimizer: int, value: float) -> None:
        """Clamp gradients to [-value, value].

        Raises:
            StepError: They are clipped already.
        """
        self._set(optimizer, Clip(value=float(value)))

    def unscale(self, optimizer: int, factor: float) -> None:
        """Multiply gradients by `factor`, a power of two, before they are clipped."""
        self._check_open(optimizer)
        self._unscale[optimizer] = factor

    def unscaled(self, optimizer: int, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of a gradient of `optimizer` as it is once it is unscaled."""
        # A power of two: no bit of the norm depends on when it is multiplied.
        return norm * self._unscale[optimizer] if optimizer in self._unscale else norm

    def share(self, optimizers: Sequence[int], clip: Clip) -> None:
        """Clip the gradients of several optimizers alike.

        Raises:
            StepError: Those of one are clipped already; then none is.
        """
        for optimizer in optimizers:
            self._check_open(optimizer)
        for optimizer in optimizers:
            self._set(optimizer, clip)

    def is_clipped(self, optimizer: int) -> bool:
        """Return whether an optimizer's gradients are clipped, or unscaled, when it steps."""
        return optimizer in self._clips or optimizer in self._unscale

    def of(self, optimizer: int) -> Clip:
        """Return how an optimizer's gradients are clipped."""
        clip = self._clips.get(optimizer, Clip())
        return dataclasses.replace(clip, unscale=self._unscale.get(optimizer))

    def forget(self, optimizer: int) -> None:
        """Clip and unscale an optimizer's gradients no more."""
        self._clips.pop(optimizer, None)
        self._unscale.pop(optimizer, None)

    def clear(self) -> None:
        """Clip and unscale nothing."""
        self._clips.clear()
        self._unscale.clear()

    def _set(self, optimizer: int, clip: Clip) -> None:
        self._check_open(optimizer)
        self._clips[optimizer] = clip

    def _check_open(self, optimizer: int) -> None:
        if optimizer in self._clips:
            raise StepError(
                "gradients were clipped twice before one step; paging applies one "
                "clipping per step. Remove gradient_clip_val from the Trainer, or your own call."
            )
