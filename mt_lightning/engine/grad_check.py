"""Look at a gradient as it arrives: can it be that of a weight that is on pages?"""

from __future__ import annotations

import torch
from torch import nn

from mt_lightning.engine.first_step import keeping
from mt_lightning.engine.runtime import Runtime
from mt_lightning.errors import StepError
from mt_lightning.pages.table import Page


def check_grad(run: Runtime, page: Page, param: int, grad: torch.Tensor) -> None:
    """Raise StepError where a gradient cannot be right, or cannot be kept.

    Args:
        run: The parts.
        page: The page of the parameter.
        param: Its index there.
        grad: The gradient.
    """
    name = page.layout.params[param].name
    if page.index not in run.binder.used:
        raise StepError(
            f"{name} got a gradient, but no unit that holds it ran: its weights were read outside "
            f"their module's forward ({', '.join(page.layout.units)}), where they are not in "
            f"memory. Nothing was changed. Let them stay there: {keeping({name})}."
        )
    if grad.is_sparse:
        raise StepError(f"{name} got a sparse gradient; set sparse=False on its module.")


def check_unowned(run: Runtime, page: Page, param: int, parameter: nn.Parameter) -> None:
    """Raise StepError where the parameter of a page without an optimizer has one by now."""
    optimizers = [trained.optimizer for trained in run.steps.trained]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(parameter is other for group in groups for other in group["params"]):
        raise StepError(
            f"{page.layout.params[param].name} was given to its optimizer after the start. Give "
            "every parameter that will ever be trained to the optimizer in configure_optimizers, "
            "and freeze by requires_grad=False."
        )


def check_open(run: Runtime, page: Page, param: int) -> None:
    """Raise StepError when a page that gets a gradient has been updated, or clipped, already."""
    owner = page.layout.optimizer
    if owner is not None and run.steps.clipping.is_clipped(owner):
        raise StepError(
            f"{page.layout.params[param].name} got another gradient after the gradients had been "
            "clipped, which takes effect when the optimizer steps: the new one would be clipped "
            "too. Clip once, after the last backward before optimizer.step()."
        )
    if run.steps.is_updated(page):
        raise StepError(
            f"{page.layout.params[param].name} got another gradient after its unit had been "
            "updated in the same step; a unit that runs several times inside checkpoints with "
            "use_reentrant=True does that. The step is undone. Use use_reentrant=False, or "
            "gradient_clip_val to update after backward."
        )
