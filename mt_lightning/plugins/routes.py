"""Methods that Lightning and the module keep of their own, led to where gradients and state are."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

_WRAPPED = ("zero_grad", "state_dict", "load_state_dict")


class Routes:
    """While attached, wrappers of optimizers and `module.zero_grad` reach the paged optimizers."""

    def __init__(self) -> None:
        self._wrappers: Sequence[LightningOptimizer] = ()
        self._model: pl.LightningModule | None = None

    def attach(
        self,
        model: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        wrappers: Sequence[LightningOptimizer],
    ) -> None:
        """Lead them to `optimizers`, whose own methods are those of the engine by now."""
        self.detach()
        self._model, self._wrappers = model, wrappers
        for wrapper in wrappers:
            for name in _WRAPPED:
                wrapper.__dict__[name] = wrapper._optimizer.__dict__[name]

        def zero_grad(set_to_none: bool = True) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none)

        model.__dict__["zero_grad"] = zero_grad

    def detach(self) -> None:
        """Leave them as they were."""
        if self._model is not None:
            self._model.__dict__.pop("zero_grad", None)
        for wrapper in self._wrappers:
            for name in _WRAPPED:
                wrapper.__dict__.pop(name, None)
        self._model, self._wrappers = None, ()
