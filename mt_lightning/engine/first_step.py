"""What the first step did to the parameters, said once."""

from __future__ import annotations

import logging

from mt_lightning.engine.runtime import Runtime

log = logging.getLogger("mt_lightning.engine.attached")


def report_first_step(run: Runtime) -> None:
    """Say once what the first step did to the parameters."""
    check = run.end_checking()
    if check is None:
        return
    trained = [
        spec.name
        for steps in run.steps.trained
        for page in steps.pages
        for spec in page.layout.params
        if spec.numel
    ]
    still = set(trained) - check.got
    if still:
        log.warning(
            "no gradient reached %d parameter(s) in the first step: %s",
            len(still),
            listed(still),
        )
    hypers = [t.first_hyper for t in run.steps.trained if t.first_hyper is not None]
    rates = [group["lr"] for hyper in hypers for group in hyper.groups if "lr" in group]
    unchanged = check.pushed - check.changed
    if unchanged and any(float(rate) for rate in rates):
        log.warning(
            "the first step left %d parameter(s) as they were although they got a gradient: %s",
            len(unchanged),
            listed(unchanged),
        )
    if check.nonfinite:
        log.error(
            "the first step made %d parameter(s) NaN or infinite from finite gradients: %s",
            len(check.nonfinite),
            listed(check.nonfinite),
        )


def listed(names: set[str], most: int = 12) -> str:
    """Return names as text, the first of them where they are many."""
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
