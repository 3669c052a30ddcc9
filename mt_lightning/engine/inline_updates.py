"""Updates on the thread that trains: of what lies outside units, or of all that a device holds.

[Note: updates on a device] Where weights, gradients and optimizer state all fit a device, the step
is kernels on the stream that computed the gradients: there is nothing to wait for, and nothing to
move but what a commit writes. The optimizer is the user's own, on tensors of the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mt_lightning.engine.masters.seen import Seen
from mt_lightning.engine.update import Due, PageUpdate, Updater
from mt_lightning.pager.device_pool import DevicePool
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pages.table import Page
from mt_lightning.tiers import ledger, spans

MakeJob = Callable[[Page, Due, PoolEntry], PageUpdate]


class InlineUpdates:
    """Runs updates one after the other.

    Args:
        pool: Weights on the host.
        updater: Steps the optimizer.
        there: Weights on the device where they are updated, None where the host updates.
        seen: Weights that user code may write to, as updates leave them.
    """

    def __init__(
        self, pool: WeightPool, updater: Updater, there: DevicePool | None, seen: Seen
    ) -> None:
        self._pool = pool
        self._updater = updater
        self._there = there
        self._seen = seen

    @spans.spanned("update", ledger.UPDATE)
    def run(self, page: Page, due: Due, make_job: MakeJob) -> None:
        """Update a page; it has a gradient."""
        if self._there is not None:
            self._run_there(self._there, page, due, make_job)
            return
        # It is tiny, and no forward announces its use.
        entry = self._pool.open(page)
        self._updater.update(make_job(page, due, entry)).wait()
        due.grads.free()
        self._pool.close(entry)

    def _run_there(self, there: DevicePool, page: Page, due: Due, make_job: MakeJob) -> None:
        entry = self._pool.pin(page)
        try:
            with torch.inference_mode(False), torch.no_grad():
                there.bring(page, entry)
                job = make_job(page, due, entry)
                job.plane = there.begin_update(page)
                job.unwritten = self._seen.unwritten(page, job.plane)
                self._updater.update(job).wait()
                there.end_update(page)
                self._seen.take(page, job.plane)
            due.grads.free()
            there.release(page)
        finally:
            self._pool.release(entry)
