"""Which step is to be committed, and with which state of the loop that trains.

[Note: when a commit is due]
Every step, unless updates leave pages in RAM. Then: when everything was to be written anyway (a
checkpoint is saved, the run ends), some minutes after the last commit, and behind the first step of
a run whose weights came from elsewhere, which could not be started anew without them.
"""

from __future__ import annotations

from collections.abc import Callable

from mt_lightning.engine.commit import Committer
from mt_lightning.engine.durability import COMMIT_INTERVAL_S
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.engine.write_back import WriteBack
from mt_lightning.tiers.ledger import Clock
from mt_lightning.tiers.uninterrupted import uninterrupted


class StepCommits:
    """Submits the commit of each step behind its updates.

    Args:
        committer: Writes records.
        worker: Runs updates and commits in order.
        take_touched: Writes what is left in RAM; returns, and forgets, the files written since the
            last commit.
        write_back: Holds what is left in RAM while a commit waits for its turn.
        clock: Seconds.
    """

    def __init__(
        self,
        committer: Committer,
        worker: UpdateWorker,
        take_touched: Callable[[], set[str]],
        write_back: WriteBack,
        clock: Clock,
    ) -> None:
        self._committer = committer
        self._worker = worker
        self._take_touched = take_touched
        self._write_back = write_back
        self._clock = clock
        self._committed_s = clock()
        self.followed = False
        """Whether a loop says when a step has ended, and with which state it goes on from there."""
        self._run_state = committer.run_state
        self._run_state_step = -1
        self._due = False
        self._asked = False
        """Whether everything was written in the middle of a batch, for a checkpoint."""
        self._step = committer.step
        self.num_edits = 0
        """How often something was written outside a step."""

    @property
    def committed_step(self) -> int:
        """The step that the last record names."""
        return self._committer.step

    def stepped(self, step: int) -> None:
        """Take note that a step has been taken."""
        self._step, self._due = step, True

    def end_step(self, run_state: bytes | None) -> None:
        """Take the state of the loop, now that all of a step is done."""
        self._run_state, self._run_state_step, self._due = run_state, self._step, True

    def submit(self, *, force: bool = False) -> None:
        """Submit the commit of the last step, if it is due.

        In the middle of a batch it is not: nobody could go on from there.

        Args:
            force: Whether to commit now what would wait for a while.
        """
        if not self._due:
            return
        if self.followed and self._run_state_step != self._step:
            self._asked |= force
            return
        if not (force or self._is_time()):
            return
        step, run_state = self._step, self._run_state
        self._submit(lambda: self._committer.commit(step, self._take_touched, run_state))
        self._due = self._asked = False
        self._committed_s = self._clock()

    def _is_time(self) -> bool:
        if not self._write_back.active or self._asked:
            return True
        if self._committer.begun and not self._committer.step:
            return True
        return self._clock() - self._committed_s >= COMMIT_INTERVAL_S

    def write(self, keep: Callable[[set[str]], None]) -> None:
        """Submit the writing of what is left in RAM, behind the updates; nothing is committed."""
        if self._write_back.active:
            self._submit(lambda: keep(self._write_back.write()))

    def _submit(self, run: Callable[[], None]) -> None:
        if self._write_back.active:
            self._worker.drain_commits()
        with uninterrupted():
            self._worker.submit(run, None, self._write_back.hold())

    def now(self, files: set[str], *, begun: bool) -> None:
        """Commit what was written outside a step; nothing is pending."""
        self.num_edits += 1
        self._committer.begun |= begun
        touched = self._take_touched() | files
        self._committer.commit(self._step, lambda: touched, self._run_state)

    def replace(self, run_state: bytes | None) -> None:
        """Let another state of the loop go with the weights, which are loaded from elsewhere.

        Args:
            run_state: None while it is not known; then the next step is committed at once.
        """
        self._run_state, self._asked = run_state, run_state is None

    def reset(self) -> None:
        """Forget what is not committed."""
        self._due = self._asked = False
        self._step, self._run_state = self._committer.step, self._committer.run_state
