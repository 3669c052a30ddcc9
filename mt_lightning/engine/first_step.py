"""What the first step did to the parameters, said once."""

from __future__ import annotations

import logging

from mt_lightning.engine.runtime import Runtime

log = logging.getLogger("mt_lightning.engine.attached")


def report_first_step(run: Runtime, *, drained: bool) -> None:
    """Say once what the first step did to the parameters.

    Args:
        run: It may not have made a step yet; nothing is said then.
        drained: Whether all updates are done. Else nothing is said before each optimizer has
            stepped once and its updates are done.
    """
    stepped = [trained for trained in run.steps.trained if trained.first_hyper is not None]
    if run.check is None or not stepped:
        return
    pages = [page for trained in stepped for page in trained.pages]
    if not drained and (
        len(stepped) < len(run.steps.trained) or any(run.steps.is_due(page) for page in pages)
    ):
        return
    check = run.end_checking()
    assert check is not None
    trained = [spec.name for page in pages for spec in page.layout.params if spec.numel]
    still = set(trained) - check.got
    if still:
        log.warning(
            "no gradient reached %d parameter(s) in the first step: %s",
            len(still),
            listed(still),
        )
    rates = [
        group["lr"]
        for hyper in (trained.first_hyper for trained in stepped)
        for group in (hyper.groups if hyper is not None else ())
        if "lr" in group
    ]
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


def keeping(names: set[str]) -> str:
    """Return the setting that lets weights stay in memory for code that reads them itself.

    Args:
        names: The weights, as far as they are known.
    """
    modules = sorted({name.rpartition(".")[0] for name in names} - {""})
    if 0 < len(modules) <= 3:
        return f"resident={modules}"
    return "resident=[...] with their modules' names (such as 'lm_head', for a loss of its own)"


def listed(names: set[str], most: int = 12) -> str:
    """Return names as text, the first of them where they are many."""
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
