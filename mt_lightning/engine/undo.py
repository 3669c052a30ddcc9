"""Going back to the last commit when a step broke off while it changed pages."""

from __future__ import annotations

import logging

from mt_lightning.engine.runtime import Runtime
from mt_lightning.errors import StepError
from mt_lightning.tiers.io import IOQueue

log = logging.getLogger(__name__)

_WAY_OUT = (
    "Begin again from the commit with a new Trainer and on_existing='resume', or load a checkpoint."
)


def undo_partial_step(run: Runtime, io: IOQueue) -> int:
    """Let every page be what the last commit says, before somebody looks at half a step.

    Callbacks that save on an exception run before the strategy hears of it.

    Returns:
        How many finished steps that costs beside the one that broke off.
    """
    finished = run.steps.count
    run.steps.reset()
    run.build.table.rollback()
    run.planes.forget_updates()
    for page in run.build.table:
        if page.index not in run.build.resident and not run.binder.is_bound(page):
            run.planes.changes(page)
            run.pool.drop(page)
    for entry in run.resident:
        weight = entry.page.weight
        io.read(weight.file, [(0, entry.frame.memory)], sums=list(weight.sums[0])).wait()
        entry.dirty = False
        run.planes.changed(entry.page)
    return finished - run.steps.count


def release_pages(run: Runtime) -> None:
    """Take pages back from units that an error or Ctrl-C has ended, so that updates find room.

    An interrupt comes on any line, also between taking a page and noting who has to release it.
    """
    run.worker.drain()  # jobs release their pages themselves
    run.binder.reset()
    run.planes.reset()
    run.pool.unpin(set(run.build.resident))
    run.graphs.collect()
    run.inputs.sweep()


def refuse_lost(num_lost: int, committed_step: int) -> None:
    """Raise StepError where weights and loops are no longer of the same step."""
    if num_lost:
        raise StepError(
            f"a step broke off while it changed pages, and the last commit is step "
            f"{committed_step}: the pages are {num_lost} step(s) behind the loops, and a "
            f"checkpoint would mix the two. {_WAY_OUT}"
        )


def tell_lost(reached: int, committed_step: int) -> None:
    """Warn that the pages are those of the last commit.

    Args:
        reached: The step that was not completed, or the last one where none had begun.
        committed_step: The step of the commit.
    """
    log.warning(
        "step %d was not completed; the parameters are those of the last commit (step %d): "
        "%d step(s) are lost.%s",
        reached,
        committed_step,
        reached - committed_step,
        f" {_WAY_OUT}" if reached - committed_step > 1 else "",
    )


def tell_kept_back(reached: int, committed_step: int) -> None:
    """Warn that finished steps are not committed, because nobody could go on behind them.

    Args:
        reached: The last finished step.
        committed_step: The step of the commit.
    """
    if reached > committed_step:
        log.warning(
            "the last commit is step %d: the %d step(s) after it belong to a batch, or to several "
            "that gather gradients by hand, which did not come to their end. The parameters keep "
            "them; a run that goes on takes them again.",
            committed_step,
            reached - committed_step,
        )
