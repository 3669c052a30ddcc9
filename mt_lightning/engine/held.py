"""What can be said of the gradients that an optimizer is about to use, in RAM or on disk."""

from __future__ import annotations

import torch

from mt_lightning.engine.gradients import Gradients
from mt_lightning.engine.trained import Trained
from mt_lightning.optim.norm import all_finite, grad_norm_of
from mt_lightning.pages.table import PageTable


def held_norms(
    trained: Trained, table: PageTable, gradients: Gradients
) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """Return norm and dtype of each gradient, in the optimizer's own order; nothing is pending."""
    norms, dtypes = [], []
    for index, param in trained.order:
        page = table[index]
        held = gradients.held(page)
        if held is None or not held.has(param):
            continue
        grad = held.ram[param]
        norms.append(held.spill.norms[param] if grad is None else grad_norm_of(grad))
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
