"""Clip gradients that are on pages as torch's functions do, in the order of the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mt_lightning.engine.held import held_norm
from mt_lightning.engine.runtime import Runtime
from mt_lightning.errors import StepError
from mt_lightning.optim.norm import Clip, clip_coefficient, grad_norm_of, total_norm


class Clipper:
    """Clips what the optimizers of one handle are about to use.

    Args:
        run: The parts of the engine.
        places: Page and position of each parameter by its `id`.
    """

    def __init__(self, run: Runtime, places: dict[int, tuple[int, int]]) -> None:
        self._run = run
        self._places = places

    def answer(
        self, name: str, function: Callable[..., Any], parameters: list[Any], *args: Any, **kw: Any
    ) -> Any:
        """Do what `torch.nn.utils.<name>` was called for."""
        given = inspect.signature(function).bind(parameters, *args, **kw)
        given.apply_defaults()
        values = {key: value for key, value in given.arguments.items() if key != "foreach"}
        return self.by_value(**values) if name == "clip_grad_value_" else self.by_norm(**values)

    def by_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients at the next step; return their norm before that (0-D).

        Args:
            parameters: All that have a gradient and are trained by one of the optimizers that come
                into it. Others, which are not on pages, are scaled at once.
            max_norm: The most that their total norm may be.
            norm_type: 2.
            error_if_nonfinite: Whether a NaN or infinite norm raises.

        Raises:
            StepError: Pages cannot do it.
            RuntimeError: The norm is not finite, and `error_if_nonfinite` was set.
        """
        if float(norm_type) != 2.0:
            raise StepError(f"norm_type={norm_type!r}: gradients on pages are clipped by norm 2.")
        norms, dtypes, loose, owners = [], [], [], self._owners(parameters := list(parameters))
        for param in parameters:
            place = self._places.get(id(param))
            if place is None:
                if param.grad is not None:
                    norms.append(grad_norm_of(param.grad))
                    dtypes.append(param.grad.dtype)
                    loose.append(param.grad)
            elif (norm := self._norm(*place)) is not None:
                norms.append(norm)
                dtypes.append(param.dtype)
        norm = total_norm(norms, dtypes)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the total norm of the gradients is {norm.item()}, and error_if_nonfinite=True. "
                "Nothing was clipped."
            )
        coefficient = clip_coefficient(float(max_norm), norm)
        clipping = self._run.steps.clipping
        clipping.last_norm = float(norm)
        if float(coefficient) != 1.0:
            clipping.share(owners, Clip(coefficient=coefficient))
            Clip(coefficient=coefficient).apply(loose)
        return norm

    def by_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp gradients to [-clip_value, clip_value] at the next step.

        Args:
            parameters: As for `by_norm`.
            clip_value: The bound.

        Raises:
            StepError: Pages cannot do it.
        """
        clip = Clip(value=float(clip_value))
        parameters = list(parameters)
        self._run.steps.clipping.share(self._owners(parameters), clip)
        loose = [p for p in parameters if id(p) not in self._places and p.grad is not None]
        clip.apply([p.grad for p in loose if p.grad is not None])

    def _norm(self, page: int, index: int) -> torch.Tensor | None:
        of_index = self._run.build.table[page]
        norm = held_norm(self._run.gradients.held(of_index), of_index, index)
        owner = of_index.layout.optimizer
        if norm is None or owner is None:
            return norm
        return self._run.steps.clipping.unscaled(owner, norm)

    def _owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return the optimizers whose gradients these are, which must be all that they have."""
        run = self._run
        run.worker.drain()
        if len({id(param) for param in parameters}) != len(parameters):
            raise StepError("a parameter is given twice: it would be clipped twice.")
        given = {self._places[id(p)] for p in parameters if id(p) in self._places}
        owners: set[int] = set()
        for param in parameters:
            place = self._places.get(id(param))
            layout = run.build.table[place[0]].layout if place is not None else None
            if place is None or layout is None:
                continue
            if layout.optimizer is not None:
                owners.add(layout.optimizer)
            elif param.requires_grad:
                raise StepError(
                    f"{layout.params[place[1]].name} requires a gradient but is in no optimizer, "
                    "so that its gradient, which counts in the norm, is not kept. Set "
                    "requires_grad=False, or leave it out of what is clipped."
                )
        for owner in sorted(owners):
            for page, index in run.steps.trained[owner].order:
                if (page, index) not in given and self._norm(page, index) is not None:
                    name = run.build.table[page].layout.params[index].name
                    raise StepError(
                        f"{name} has a gradient and is not among the parameters to be clipped: "
                        "all that one optimizer trains is clipped together, once per step."
                    )
        return sorted(owners)
