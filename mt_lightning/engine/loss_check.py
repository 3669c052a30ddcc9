"""Look at a loss before it is differentiated: were all weights there that it was made of?"""

from __future__ import annotations

import torch

from mt_lightning.engine.first_step import keeping, listed
from mt_lightning.engine.runtime import Runtime
from mt_lightning.errors import StepError


def check_loss(run: Runtime, loss: torch.Tensor, *, stepped: bool) -> None:
    """Raise when a loss was computed from parameters that were not in memory.

    The graph is searched at the first step and whenever the loss is not finite.

    Args:
        run: The parts.
        loss: The loss, any shape.
        stepped: Whether a step was taken before.

    Raises:
        StepError: A weight was read outside its unit, or the first loss is not finite and units
            of some parameters never ran.
    """
    finite = bool(torch.isfinite(loss.detach()).all())
    if finite and stepped:
        return
    outside = set(run.usage.read_outside(loss))
    if outside:
        raise StepError(
            "read outside the forward of their modules, where weights are not in memory (a penalty "
            f"over all parameters, or a functional call, does that): {listed(outside)}. Nothing "
            "was changed. Use the optimizer's weight_decay for a penalty, or name the modules that "
            f"the weights belong to: {keeping(outside)}."
        )
    if finite or stepped:
        return
    unused = [page for page in run.build.table if page.index not in run.binder.used]
    if unused:
        names = {spec.name for page in unused for spec in page.layout.params}
        raise StepError(
            "the first loss is not finite and the units of these parameters never ran: "
            f"{listed(names)}. If code reads them outside their module's forward, let them stay "
            f"in memory: {keeping(names)}."
        )
