"""What can be said of the gradients that an optimizer is about to use, in RAM or on disk."""

from __future__ import annotations

import logging

import torch

from mt_lightning.engine.gradients import Gradients, PageGrads, is_narrow
from mt_lightning.engine.trained import Trained
from mt_lightning.errors import StepError
from mt_lightning.optim.norm import all_finite, grad_norm_of
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page, PageTable

log = logging.getLogger(__name__)


def held_norm(held: PageGrads | None, page: Page, param: int) -> torch.Tensor | None:
    """Return the norm of a parameter's gradient, None where it got none; see `grad_norm_of`."""
    if held is None or not held.has(param):
        return None
    grad = held.ram[param]
    if grad is None:
        return held.spill.norms[param]
    return grad_norm_of(grad, in_float=is_narrow(page, param, grad))


def held_norms(
    trained: Trained, table: PageTable, gradients: Gradients
) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """Return norm and dtype of each gradient, in the optimizer's own order; nothing is pending."""
    norms, dtypes = [], []
    for index, param in trained.order:
        page = table[index]
        norm = held_norm(gradients.held(page), page, param)
        if norm is not None:
            norms.append(norm)
            dtypes.append(page.layout.params[param].dtype)
    return norms, dtypes


def held_finite(trained: Trained, gradients: Gradients) -> bool:
    """Return whether all of them are finite; nothing is pending."""
    for page in trained.pages:
        held = gradients.held(page)
        if held is not None and not (
            held.spill.finite and all(g is None or all_finite(g) for g in held.ram)
        ):
            return False
    return True


def nonfinite_names(trained: Trained, gradients: Gradients) -> set[str]:
    """Return the parameters whose gradients are not finite; for those on disk, all of a page."""
    names: set[str] = set()
    for page in trained.pages:
        held = gradients.held(page)
        if held is None:
            continue
        for i, spec in enumerate(page.layout.params):
            grad = held.ram[i]
            on_disk = i in held.spill.present and not held.spill.finite
            if on_disk or (grad is not None and not all_finite(grad)):
                names.add(spec.name)
    return names


def skip_nonfinite(step: int, nonfinite: str, stats: Stats) -> None:
    """Take note that a step is skipped since a gradient is not finite.

    Args:
        step: The number that it would have had.
        nonfinite: "skip" or "raise".
        stats: Counts it.

    Raises:
        StepError: nonfinite="raise".
    """
    if nonfinite == "raise":
        raise StepError(
            f"step {step}: a gradient is NaN or infinite and nonfinite='raise'. No parameter was "
            "changed. Lower the learning rate, clip, or set nonfinite='skip'."
        )
    stats.skipped_steps += 1
    log.warning("step skipped: a gradient is NaN or infinite (nonfinite='skip').")
