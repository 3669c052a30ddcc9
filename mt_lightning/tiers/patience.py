"""How long storage is given: passing errors are tried again, a full disk is waited for.

[Note: A failed sync is final]
After fsync has failed, the kernel may have dropped what it could not write and forgotten that it
did: a second fsync would succeed over lost bytes. So a sync is never tried again. What writes its
bytes and syncs them in one operation (a commit record, a small file) is, since it begins anew.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.tiers.advice import FULL, NO_DESCRIPTORS, PASSING
from mt_lightning.tiers.filesystem import free_bytes
from mt_lightning.tiers.uninterrupted import interrupt_waits

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_WAITS_S = (0.1, 0.4, 1.6)
"""How long to wait before the second, third and fourth attempt after an error that may pass."""

RETRY_TOTAL_S = 60.0
"""No attempt begins later than this after the first one failed."""

DISK_FULL_TIMEOUT_S = 600.0
"""How long space is waited for where nothing else is said."""

SAY_AGAIN_S = 60.0
"""How often a run that waits for space says so."""

_POLLS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_GLANCE_S = 0.2


class Patience:
    """Runs operations of a store until they succeed, or for as long as is reasonable. Thread safe.

    Attributes:
        stopping: Tells whether the run has been asked to end; then nothing is waited for.
        relieve: Closes files that are not in use, when no file can be opened.
    """

    def __init__(
        self,
        disk_full_timeout_s: float = DISK_FULL_TIMEOUT_S,
        *,
        retry_waits_s: Sequence[float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the limits.

        Args:
            disk_full_timeout_s: How long to wait for space; 0 fails at once.
            retry_waits_s: The pauses between attempts after an error that may pass; None:
                `RETRY_WAITS_S`.
            clock: Seconds.
        """
        self.stopping: Callable[[], bool] = lambda: False
        self.relieve: Callable[[], int] = lambda: 0
        self._disk_full_timeout_s = disk_full_timeout_s
        self._retry_waits_s = tuple(RETRY_WAITS_S if retry_waits_s is None else retry_waits_s)
        self._clock = clock
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._said_at: float | None = None

    def begin(self) -> None:
        """Wait again from now on."""
        self._ended.clear()

    def end(self) -> None:
        """Wait for nothing any more: what waits now fails."""
        self._ended.set()

    def run(self, what: str, nbytes: int, call: Callable[[], T], *, again: bool = True) -> T:
        """Run an operation.

        Args:
            what: The operation, for the messages.
            nbytes: How many bytes it needs on the disk if it must wait for space; 0 where its error
                says so.
            call: Runs it; called once more after each error that may pass.
            again: Whether it may be run again at all; see the note on syncs.

        Raises:
            StorageError: It failed for good. It is marked as final: nobody who runs this as a part
                of something larger begins that anew.
        """
        try:
            return self._run(what, nbytes, call, again)
        except StorageError as error:
            error.final = True
            raise

    def _run(self, what: str, nbytes: int, call: Callable[[], T], again: bool) -> T:
        try:
            return call()
        except StorageError as error:
            # No sync fails for want of descriptors; then nothing has been done yet.
            if _is_final(error) or not (again or error.errno in NO_DESCRIPTORS):
                raise
            first = error
        if first.errno in PASSING:
            return self._retry(what, nbytes, call, first, again)
        return self._wait_for_space(what, nbytes, call, first)

    def _retry(
        self, what: str, nbytes: int, call: Callable[[], T], error: StorageError, again: bool
    ) -> T:
        start = self._clock()
        logger.warning(
            "%s: %s failed and is tried again, %d times at most: %s",
            error.filename,
            what,
            len(self._retry_waits_s),
            error,
        )
        for wait_s in self._retry_waits_s:
            if error.errno in NO_DESCRIPTORS:
                self.relieve()
            self._ended.wait(wait_s)
            if self._clock() - start > RETRY_TOTAL_S:
                break
            try:
                return call()
            except StorageError as another:
                error = another
            if _is_final(error) or not (again or error.errno in NO_DESCRIPTORS):
                break
            if error.errno in FULL:
                return self._wait_for_space(what, nbytes, call, error)
            if error.errno not in PASSING:
                break
        raise error

    def _wait_for_space(
        self, what: str, nbytes: int, call: Callable[[], T], error: StorageError
    ) -> T:
        if error.errno not in FULL or not self._disk_full_timeout_s:
            raise error
        start = self._clock()
        with self._lock:
            self._num_waiting += 1
        try:
            polls = iter(_POLLS_S)
            poll_s = next(polls)
            while True:
                self._say_full(what, nbytes, error)
                if not self._pause(poll_s):
                    raise _not_waited_for(error, "the run was asked to end meanwhile")
                waited_s = self._clock() - start
                try:
                    result = call()
                except StorageError as another:
                    error = another
                    if _is_final(error) or error.errno not in FULL:
                        raise
                else:
                    logger.warning(
                        "%s: there is space again after %.0f s; %s is done and the run goes on.",
                        error.filename,
                        waited_s,
                        what,
                    )
                    return result
                if waited_s >= self._disk_full_timeout_s:
                    raise _not_waited_for(
                        error,
                        f"no space came in {waited_s:.0f} s, and disk_full_timeout_s="
                        f"{self._disk_full_timeout_s:g} allows no more",
                    )
                poll_s = next(polls, poll_s)
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._said_at = None

    def _pause(self, seconds: float) -> bool:
        """Wait; return False as soon as the run is to end."""
        deadline = time.monotonic() + seconds
        while not (self._ended.is_set() or self.stopping() or interrupt_waits()):
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            self._ended.wait(min(left, _GLANCE_S))
        return False

    def _say_full(self, what: str, nbytes: int, error: StorageError) -> None:
        """Say once a minute, for all that wait, what is needed where."""
        now = self._clock()
        with self._lock:
            if self._said_at is not None and now - self._said_at < SAY_AGAIN_S:
                return
            self._said_at = now
            num_others = self._num_waiting - 1
        path = str(error.filename)
        free = f", {free_bytes(path)} are free" if os.path.isabs(path) else ""
        needed = (
            f"{what} needs {nbytes} bytes" if nbytes else f"{what} needs room: {error.strerror}"
        )
        others = f"; {num_others} more operation(s) wait" if num_others else ""
        logger.warning(
            "%s: the disk is full (%s). The run pauses: %s%s%s. Make room there; it "
            "goes on by itself, or fails after %g s (disk_full_timeout_s).",
            path,
            os.strerror(error.errno or 0),
            needed,
            free,
            others,
            self._disk_full_timeout_s,
        )


def _is_final(error: StorageError) -> bool:
    return error.final or isinstance(error, CorruptPageError)


def _not_waited_for(error: StorageError, why: str) -> StorageError:
    return StorageError(
        error.errno,
        f"{error.strerror}; {why}. The last commit is whole: make room, and go on with "
        "on_existing='resume'",
        error.filename,
    )
