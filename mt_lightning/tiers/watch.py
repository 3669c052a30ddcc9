"""Says which tier stalls: an operation, an update or a wait that takes too long, by name."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

STALL_S = 30.0
"""What takes longer than this is named in a warning, and again after twice, four times as long."""


class Watched:
    """Something that is under way; a context manager."""

    __slots__ = ("_watch", "num_told", "since_s", "tell_at_s", "what")

    def __init__(self, watch: Watch, what: str) -> None:
        self._watch = watch
        self.what = what
        self.since_s = 0.0
        self.tell_at_s = 0.0
        self.num_told = 0

    def __enter__(self) -> None:
        self._watch._begin(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watch._end(self)


class Watch:
    """Knows what is under way and since when; one thread looks at it a few times per limit."""

    def __init__(
        self, limit_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make a watch; `start` lets it look by itself.

        Args:
            limit_s: What takes longer is named; None: `STALL_S`.
            clock: Seconds.
        """
        self.queued: Callable[[], int] = lambda: 0
        self._limit_s = STALL_S if limit_s is None else limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: set[Watched] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def over(self, what: str) -> Watched:
        """Return a context manager around something that should not take long."""
        return Watched(self, what)

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._look, name="megatrain-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Name what has taken too long by now."""
        now = self._clock()
        with self._lock:
            late = [watched for watched in self._under_way if now >= watched.tell_at_s]
            for watched in late:
                watched.num_told += 1
                watched.tell_at_s = watched.since_s + self._limit_s * 2**watched.num_told
            num_under_way = len(self._under_way)
        for watched in sorted(late, key=lambda each: each.since_s):
            logger.warning(
                "%s has taken %.0f s and is not done; %d operation(s) are under way and %d blocks "
                "wait for an I/O thread.",
                watched.what,
                now - watched.since_s,
                num_under_way,
                self.queued(),
            )

    def _look(self) -> None:
        while not self._closed.wait(self._limit_s / 4):
            self.check()

    def _begin(self, watched: Watched) -> None:
        watched.since_s = self._clock()
        watched.tell_at_s = watched.since_s + self._limit_s
        with self._lock:
            self._under_way.add(watched)

    def _end(self, watched: Watched) -> None:
        with self._lock:
            self._under_way.discard(watched)
        if watched.num_told:
            logger.warning("%s ended after %.0f s.", watched.what, self._clock() - watched.since_s)
