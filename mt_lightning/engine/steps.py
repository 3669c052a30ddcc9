"""When a page is updated: at once behind backward, or just before its next forward.

[Note: two schedules, no staleness]
eager: a page is updated as soon as its last gradient has arrived and autograd has let go of its
frame, while backward goes on. deferred: gradients wait (in RAM, or on disk) until the whole step is
known, for clipping or a finite check, and a page is updated just before its next forward, while the
units before it compute. Either way a page is updated before it is used again: the result is that of
plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mt_lightning.engine.build import Build
from mt_lightning.engine.clipping import Clipping
from mt_lightning.engine.commit import Committer
from mt_lightning.engine.gradients import Gradients, PageGrads
from mt_lightning.engine.held import held_finite, held_norms, skip_nonfinite
from mt_lightning.engine.inline_updates import InlineUpdates
from mt_lightning.engine.masters.seen import Seen
from mt_lightning.engine.spill import Spiller
from mt_lightning.engine.step_commits import StepCommits
from mt_lightning.engine.trained import Trained
from mt_lightning.engine.update import Due, PageUpdate, Updater
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.engine.write_back import WriteBack
from mt_lightning.optim.norm import Clip
from mt_lightning.optim.shadow import Hyper, snapshot
from mt_lightning.pager.device_pool import DevicePool
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page
from mt_lightning.tiers import ledger
from mt_lightning.tiers.uninterrupted import uninterrupted


class Steps:
    """Turns gradients into updates and updates into commits."""

    def __init__(
        self,
        build: Build,
        trained: list[Trained],
        gradients: Gradients,
        pool: WeightPool,
        worker: UpdateWorker,
        updater: Updater,
        inline: Updater,
        spiller: Spiller,
        committer: Committer,
        stats: Stats,
        spilled: set[int],
        nonfinite: str,
        write_back: WriteBack,
        clock: ledger.Clock,
        seen: Seen,
        there: DevicePool | None = None,
    ) -> None:
        self._build = build
        self._table = build.table
        self.trained = trained
        self._gradients = gradients
        self._pool = pool
        self._worker = worker
        self._updater = updater
        self._inline = inline
        self._inline_updates = InlineUpdates(pool, inline, there, seen)
        self._spiller = spiller
        self._stats = stats
        self.spilled = spilled
        """Pages whose gradients go to disk; shortage of memory adds to them."""
        self._nonfinite = nonfinite
        inline_pages = build.resident if there is None else [page.index for page in build.table]
        self._inline_pages = set(inline_pages)
        """Pages that are updated by the training thread: those outside units, or on a device."""
        self._armed: int | None = None
        self._eager_clip = Clip()
        self._submitted: set[int] = set()
        self._hyper: Hyper | None = None
        self._ready: list[Page] = []
        self._due: dict[int, Due] = {}
        self.clipping = Clipping()
        self._stepped: set[int] = set()
        """Optimizers that stepped since a step last ended for the loop that trains."""
        self._write_back = write_back
        self._written: set[str] = set()
        self.commits = StepCommits(committer, worker, self.take_touched, write_back, clock)
        self.awaits: Callable[[Page], bool] = lambda page: False
        """Whether backward may still ask for weights of a page that nobody holds now."""
        self.count = committer.step
        self.partial = False
        """Whether a step has begun to change pages and is not finished."""

    # -- backward ---------------------------------------------------------------------------------

    def arm(self, optimizer: int, clip_value: float | None = None) -> None:
        """Let the coming backward update pages of `optimizer` as their gradients complete."""
        # Taken here: a replay would show the forward's autocast region, which the step is not in.
        self._armed, self._hyper = optimizer, snapshot(self.trained[optimizer].optimizer)
        self._eager_clip = Clip(value=clip_value)

    def disarm(self) -> None:
        """End eager updates."""
        self._armed, self._hyper = None, None

    def before_backward(self) -> None:
        """Finish the step before: units that the forward did not reach are updated now."""
        self.flush()

    def is_updated(self, page: Page) -> bool:
        """Return whether `page` has been updated in this step already."""
        return page.index in self._submitted

    def on_complete(self, page: Page) -> None:
        """Take note that `page` has all its gradients of this backward."""
        if page.index in self._inline_pages:
            return
        if self._armed is not None and page.layout.optimizer == self._armed:
            self._ready.append(page)
        elif page.index in self.spilled:
            part = self._gradients.take_ram(page)
            if part is not None:
                self._submit_spill(page, part)

    def submit_ready(self, coming: Sequence[Page] = ()) -> None:
        """Submit eager updates of pages whose frames autograd has let go of.

        Args:
            coming: Pages whose gradients are computed next; their state begins to be read.
        """
        waiting = []
        for page in self._ready:
            entry = self._pool.entry(page)
            if self.awaits(page) or (entry is not None and entry.frame.in_use()):
                waiting.append(page)
            else:
                self._submit_eager(page)
        self._ready = waiting
        for page in coming if self._armed is not None else ():
            if page.layout.optimizer == self._armed and len(page.layout.units) == 1:
                self._updater.coming = page, self.count
                self._worker.hint(self._updater.preload)

    def relieve(self) -> bool:
        """Give memory back when training runs out of it; False when nothing can be given.

        The oldest update is waited for; failing that, gradients of a page whose unit has run but
        that misses some, or that autograd has not let go of, go to disk.
        """
        if self._worker.retire_oldest():
            return True
        for page in (*self._gradients.unfinished(), *self._ready, *self._gradients.in_ram()):
            entry = self._pool.entry(page)
            if page.index in self._inline_pages or (entry is not None and entry.pins):
                continue
            self._gradients.complete(page)
            part = self._gradients.take_ram(page)
            if part is not None:
                # Its next gradients go there too: a sum lies either in RAM or on disk.
                self.spilled.add(page.index)
                self._submit_spill(page, part)
                return True
        return False

    def _submit_spill(self, page: Page, part: PageGrads) -> None:
        self._worker.submit(
            lambda: self._spiller.spill(page, part, measure=True), page.index, part.free
        )

    def _take(self, page: Page) -> PageGrads | None:
        """Take a page's gradient; a spill under way must end first, it knows what is on disk."""
        self._worker.retire_page(page.index)
        return self._gradients.take(page)

    def _submit_eager(self, page: Page) -> None:
        assert self._hyper is not None
        self._gradients.check_cleared(page)
        grads = self._take(page)
        if grads is None:
            return
        self.partial = True
        self._submitted.add(page.index)
        self._submit(page, Due(grads, self._hyper, self._eager_clip))

    # -- step -------------------------------------------------------------------------------------

    def clip_norm(self, optimizer: int, max_norm: float) -> torch.Tensor:
        """Scale gradients when `optimizer` steps, so that their norm is at most `max_norm`."""
        self._worker.drain()
        norms, dtypes = held_norms(self.trained[optimizer], self._table, self._gradients)
        return self.clipping.by_norm(optimizer, max_norm, norms, dtypes)

    def clip_value(self, optimizer: int, value: float) -> None:
        """Clamp the gradients of `optimizer` when it steps; known in advance where it is armed."""
        if self._armed == optimizer:
            assert self._eager_clip.value == float(value)
            return
        self.clipping.by_value(optimizer, value)

    def unscale(self, optimizer: int, factor: float) -> bool:
        """Multiply gradients by `factor` when `optimizer` steps; False where one is not finite."""
        self._worker.drain()
        self.clipping.unscale(optimizer, factor)
        return held_finite(self.trained[optimizer], self._gradients)

    def step(self, optimizer: int) -> bool:
        """Apply the gradients of `optimizer`; False when the step was skipped.

        Raises:
            StepError: A gradient is not finite and nonfinite="raise".
        """
        trained = self.trained[optimizer]
        for page in trained.pages:
            self._gradients.check_cleared(page)
        if self._nonfinite != "propagate":
            self._worker.drain()
        if self._nonfinite != "propagate" and not held_finite(trained, self._gradients):
            self.zero_grad(optimizer)
            skip_nonfinite(self.count + 1, self._nonfinite, self._stats)
            return False
        eager = self._armed == optimizer
        hyper = self._hyper if eager and self._hyper else snapshot(trained.optimizer)
        trained.first_hyper = trained.first_hyper or hyper
        clip = self._eager_clip if eager else self.clipping.of(optimizer)
        self._ready.clear()
        self.partial = eager
        begun: dict[int, Due] = {}
        inline: list[tuple[Page, Due]] = []
        for page in trained.pages:
            if page.index in self._submitted:
                continue
            if not eager and page.index in self._due:
                self._submit_due(page)
            grads = self._take(page)
            if grads is None:
                continue
            due = Due(grads, hyper, clip)
            if page.index in self._inline_pages:
                inline.append((page, due))
            elif eager:
                self._submit(page, due)
            else:
                begun[page.index] = due
        if inline:
            self._worker.drain_commits()
        # Until here nothing is changed but by eager updates: an interrupt costs this step alone.
        with uninterrupted():
            self.partial = True
            for page, due in inline:
                self._inline_updates.run(page, due, self._job)
            self._due.update(begun)
            self.count += 1
            self.partial = False
            self._submitted.clear()
            self._gradients.expect_clearing(trained.pages)
            self.clipping.forget(optimizer)
            self.disarm()
            self._stats.steps += 1
            self.commits.stepped(self.count)
            self._stepped.add(optimizer)
        if eager and not self.commits.followed:
            self.commits.submit()
        return True

    @property
    def gathers(self) -> bool:
        """Whether an optimizer that did not step in this batch holds gradients.

        Those of one that did are cleared before it steps again, or it refuses to.
        """
        return any(page.layout.optimizer not in self._stepped for page in self._gradients.holding())

    def end_step(self, run_state: bytes | None) -> None:
        """Take the state of the loop that trains, now that all of a step is done.

        The commit of an eager step begins here, that of a deferred one with the next backward.
        """
        self._stepped.clear()
        self.commits.end_step(run_state)
        if not self._due:
            self.commits.submit()

    def zero_grad(self, optimizer: int) -> None:
        """Drop the gradients of `optimizer`."""
        self._gradients.clear(self.trained[optimizer].pages)
        self.clipping.forget(optimizer)

    # -- deferred ---------------------------------------------------------------------------------

    def is_due(self, page: Page) -> bool:
        """Return whether an update of `page` waits."""
        return page.index in self._due

    def before_use(self, page: Page) -> None:
        """Make sure that `page` is updated before it is read."""
        if page.index in self._due:
            self._submit_due(page)
        self._worker.retire_page(page.index)

    def ahead_of_use(self, page: Page) -> None:
        """Begin an update that will be needed soon, if its weights can be had without a wait."""
        due = self._due.get(page.index) if self._worker.has_room else None
        entry = self._pool.prefetch(page) if due is not None else None
        if due is None or entry is None:
            return
        whole = due.grads.must_be_whole(page)
        fits = not whole or self._pool.can_reserve(page.layout.waiting_bytes)
        self._pool.release(entry)
        if fits and not entry.frame.in_use():
            self._submit_due(page)

    def flush(self, *, force: bool = False) -> None:
        """Submit everything due, then the commit of the step; with `force`, whether due or not."""
        for index in list(self._due):
            self._submit_due(self._table[index])
        self.commits.submit(force=force)

    def drain(self, *, write: bool = True) -> None:
        """Apply everything, write it and commit it where it can be; wait for it."""
        self.flush(force=write)
        if write:
            self.commits.write(self._written.update)
        self._worker.drain()

    def _submit_due(self, page: Page) -> None:
        # It stays due until it is queued: who waits for room may be interrupted.
        self._submit(page, self._due[page.index])

    def commit_now(self, *, weights: bool = False) -> None:
        """Commit what was written outside a step; nothing is pending.

        Args:
            weights: Whether every weight plane may have been written, by the start of the run.
        """
        files = {page.weight.file for page in self._table if weights}
        self.commits.now(files, begun=not weights)

    def take_touched(self) -> set[str]:
        """Write what is left in RAM; return and forget the files written since the last commit."""
        touched = self._write_back.write() | self._written
        self._written.clear()
        for updater in (self._updater, self._inline):
            touched |= updater.touched
            updater.touched = set()
        return touched

    def _submit(self, page: Page, due: Due) -> None:
        self._worker.retire_page(page.index)
        entry = self._pool.open(page)

        def retire() -> None:
            due.grads.free()
            self._pool.release(entry)

        def queued() -> None:
            if self._due.get(page.index) is due:
                del self._due[page.index]

        try:
            if entry.frame.in_use():
                self._worker.drain_commits()  # one may be writing the frame
                self._pool.copy_on_write(page)
            if due.grads.must_be_whole(page):
                what = f"the gradients of page {page.layout.key}, which its optimizer needs whole,"
                room = self._pool.reserve(page.layout.waiting_bytes, "gradients", what)
                due.grads.reservations.append(room)
            job = self._job(page, due, entry)
            self._worker.submit(lambda: self._updater.update(job), page.index, retire, queued)
        except BaseException:
            if not self._worker.is_pending(page.index):
                self._pool.release(entry)
            raise

    def _job(self, page: Page, due: Due, entry: PoolEntry) -> PageUpdate:
        assert page.layout.optimizer is not None
        members, trained = self._build.members[page.index], self.trained[page.layout.optimizer]
        return PageUpdate(page, entry, due.grads, members, trained, due.hyper, due.clip)

    def reset(self) -> list[BaseException]:
        """Forget everything that is not committed; return what running jobs raised."""
        errors = self._worker.abandon()
        for due in self._due.values():
            due.grads.free()
        self._due.clear()
        self._ready.clear()
        self._submitted.clear()
        self.clipping.clear()
        self._gradients.reset()
        self.disarm()
        self.partial = False
        self.commits.reset()
        self.count = self.commits.committed_step
        for updater in (self._updater, self._inline):
            updater.forget()
            updater.touched = set()
        return errors
