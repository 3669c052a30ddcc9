"""The update worker: one thread that runs jobs in the order they were submitted.

[Note: what a job leaves under way] An update ends with writes. The next one does not wait for them:
the job returns an `Ending`, and the worker goes on. Who retires the job, or a commit behind it,
waits for the last byte. Until then the job holds what it held: no memory is taken anew.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from mt_lightning.engine.ending import Ending
from mt_lightning.pages.table import Page
from mt_lightning.tiers.ledger import UPDATE, WORK, WRITE, Ledger, keep, mine
from mt_lightning.tiers.spans import Span
from mt_lightning.tiers.uninterrupted import uninterrupted
from mt_lightning.tiers.watch import Watch

MAX_PENDING = 2
"""More pending updates than this would only pile up gradients behind the disk."""


@dataclass
class _Job:
    future: Future[Ending | None]
    page: int | None
    on_retire: Callable[[], None]

    @property
    def over(self) -> bool:
        """Whether nothing of it is under way any more, however it ended."""
        if not self.future.done():
            return False
        ending = None if self.future.exception() is not None else self.future.result()
        return ending is None or ending.over

    def wait(self) -> None:
        """Wait for all of it; raise what it raised."""
        ending = self.future.result()
        if ending is not None:
            ending.wait()


class UpdateWorker:
    """Runs jobs one after the other; the training thread retires them in the same order.

    A job counts as pending until it is retired, however early it finished: what the training thread
    decides then never depends on the speed of the worker. After a job has failed no later one runs;
    after what it left under way has failed, no commit.

    Args:
        watch: Names a job that takes long.
        ledger: Where the time of the thread goes.
        executor: Runs the jobs, one at a time; None: a thread.
    """

    def __init__(self, watch: Watch, ledger: Ledger, executor: Executor | None = None) -> None:
        self._watch = watch
        self._ledger = ledger
        self._pool = executor or ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="megatrain-update",
            initializer=keep,
            initargs=(ledger,),
        )
        self._pending: deque[_Job] = deque()
        self._endings: deque[Ending] = deque()
        """What may be under way still; the worker's own."""
        self._error: BaseException | None = None

    def submit(
        self,
        run: Callable[[], Ending | None],
        page: int | None,
        on_retire: Callable[[], None],
        on_queued: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue a job; for one that holds a page, wait while too many are pending.

        Args:
            run: The job; returns what is still to be waited for when it is retired, if anything.
            page: The page that it holds, None where it holds none.
            on_retire: Called when the job has been retired.
            on_queued: Called as the job is queued; a Ctrl-C comes before or after both.
        """
        while page is not None and not self.has_room:
            self.retire_oldest()
        what = "a commit" if page is None else f"the update of page {page}"
        with uninterrupted():
            on_queued()
            job = self._pool.submit(self._run, what, run, page is None, torch.get_num_threads())
            self._pending.append(_Job(job, page, on_retire))

    def hint(self, run: Callable[[], None]) -> None:
        """Queue what makes a later job quicker; it waits for nothing, and nobody waits for it."""

        def guarded() -> None:
            if self._error is None:
                try:
                    run()
                except BaseException as error:
                    self._error = error  # the next job raises it

        self._pool.submit(guarded)

    def _run(
        self, what: str, run: Callable[[], Ending | None], commits: bool, num_threads: int
    ) -> Ending | None:
        # Matrix products give other bits on another number of threads.
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if self._error is not None:
            raise self._error
        try:
            with self._watch.over(what), Span(what, account=WORK):
                while self._endings and (commits or self._endings[0].over):
                    self._endings.popleft().wait()
                ending = run()
        except BaseException as error:
            # The frames of the traceback would keep views of pages alive.
            if error.__traceback__ is not None:
                traceback.clear_frames(error.__traceback__)
            self._error = error
            raise
        if ending is not None:
            self._endings.append(ending)
        return ending

    @property
    def has_room(self) -> bool:
        """Whether a job that holds a page can be submitted without a wait."""
        return sum(job.page is not None for job in self._pending) < MAX_PENDING

    def awaiting(self, page: Page) -> Callable[[], object] | None:
        """Return what waits, on any thread, until the last job that holds a page has changed it.

        What the job writes may be under way by then. None without such a job.
        """
        jobs = [job.future for job in self._pending if job.page == page.index]
        return jobs[-1].result if jobs else None

    def is_pending(self, page: int) -> bool:
        """Return whether a job holds the page."""
        return any(job.page == page for job in self._pending)

    def retire_oldest(self) -> bool:
        """Wait for the oldest job and let go of what it held; False when there is none.

        Raises:
            Exception: What the job raised.
        """
        if not self._pending:
            return False
        job = self._pending[0]
        try:
            self._wait(job)
        finally:
            # An interrupt may end the wait while something still works on what the job holds.
            if job.over:
                self._pending.popleft()
                job.on_retire()
        return True

    def _wait(self, job: _Job) -> None:
        ledger = mine()
        if ledger is None or job.over:
            job.wait()
            return
        what = "a commit" if job.page is None else f"page {job.page}"
        with Span("wait for update", what, UPDATE):
            with ledger.blame(self._ledger):
                job.future.result()
            with ledger.waits_behind(WRITE):
                job.wait()

    @property
    def num_pending(self) -> int:
        """Jobs that are not retired."""
        return len(self._pending)

    def retire_page(self, page: int) -> None:
        """Retire jobs until none holds the page."""
        while self.is_pending(page):
            self.retire_oldest()

    def drain_commits(self) -> None:
        """Retire jobs until no commit is pending."""
        while any(job.page is None for job in self._pending):
            self.retire_oldest()

    def drain(self) -> None:
        """Retire every job."""
        while self.retire_oldest():
            pass

    def abandon(self) -> list[BaseException]:
        """Wait for every job, return what they raised; the worker can be used again."""
        errors = []
        while self._pending:
            try:
                self.retire_oldest()
            except BaseException as error:
                errors.append(error)
        self._error = None
        self._endings.clear()
        return errors

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=True)
