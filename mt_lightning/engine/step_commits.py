"""Which step is to be committed, and with which state of the loop that trains."""

from __future__ import annotations

from collections.abc import Callable

from mt_lightning.engine.commit import Committer
from mt_lightning.engine.worker import UpdateWorker


class StepCommits:
    """Submits the commit of each step behind its updates.

    Args:
        committer: Writes records.
        worker: Runs updates and commits in order.
        take_touched: Returns, and forgets, the files written since the last commit.
    """

    def __init__(
        self, committer: Committer, worker: UpdateWorker, take_touched: Callable[[], set[str]]
    ) -> None:
        self._committer = committer
        self._worker = worker
        self._take_touched = take_touched
        self.followed = False
        """Whether a loop says when a step has ended, and with which state it goes on from there."""
        self._run_state = committer.run_state
        self._run_state_step = -1
        self._due = False
        self._step = committer.step

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

    def submit(self) -> None:
        """Submit the commit of the last step, if it is due.

        In the middle of a batch it is not: nobody could go on from there.
        """
        if not self._due or (self.followed and self._run_state_step != self._step):
            return
        self._due = False
        step, run_state = self._step, self._run_state
        self._worker.submit(
            lambda: self._committer.commit(step, self._take_touched, run_state), None, lambda: None
        )

    def now(self, files: set[str], *, begun: bool) -> None:
        """Commit what was written outside a step; nothing is pending."""
        self._committer.begun |= begun
        touched = self._take_touched() | files
        self._committer.commit(self._step, lambda: touched, self._run_state)

    def reset(self) -> None:
        """Forget what is not committed."""
        self._due = False
        self._step, self._run_state = self._committer.step, self._committer.run_state
