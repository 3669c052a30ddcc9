"""Which gradients are NaN or infinite, by the names of their parameters."""

from __future__ import annotations

from mt_lightning.engine.runtime import Runtime
from mt_lightning.optim.norm import all_finite


def nonfinite_names(run: Runtime, optimizer: int) -> set[str]:
    """Return the parameters whose gradients are not all finite; for those on disk, of a page."""
    run.worker.drain()
    names: set[str] = set()
    for page in run.steps.trained[optimizer].pages:
        held = run.gradients.held(page)
        if held is None:
            continue
        for i, spec in enumerate(page.layout.params):
            grad = held.ram[i]
            on_disk = i in held.spill.present and not held.spill.finite
            if on_disk or (grad is not None and not all_finite(grad)):
                names.add(spec.name)
    return names
