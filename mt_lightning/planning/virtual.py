"""A machine in virtual time: its clock, link and worker take the time they would, and do nothing.

[Note: who waits] The thread that trains and the update worker are greenlets. Whoever would block
lets the clock run until what it waits for is done; meanwhile the others go on. So the code that
decides in a run, which calls `wait()` deep inside, runs here as it is.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from greenlet import greenlet

READ, WRITE, UP, DOWN = "read", "write", "link up", "link down"


class VirtualClock:
    """Virtual seconds, and what happens when.

    Attributes:
        now: The time.
        busy_s: Seconds that each part of the machine has worked.
        spans: Part, name, begin and end of what was done, where `records`.
        records: Whether to keep `spans`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_s: dict[str, float] = {}
        self.spans: list[tuple[str, str, float, float]] = []
        self.records = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._hub = greenlet.getcurrent()

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call something at a time."""
        heapq.heappush(self._events, (when, next(self._count), call))

    def spend(self, part: str, name: str, seconds: float) -> None:
        """Let a part of the machine work while the caller waits for it."""
        self.note(part, name, self.now, self.now + seconds)
        done: list[bool] = []
        self.at(self.now + seconds, lambda: done.append(True))
        self.wait_until(lambda: bool(done))

    def note(self, part: str, name: str, begin: float, end: float) -> None:
        """Take note of work."""
        self.busy_s[part] = self.busy_s.get(part, 0.0) + end - begin
        if self.records and end > begin:
            self.spans.append((part, name, begin, end))

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Let time pass until something is true."""
        mine = greenlet.getcurrent()
        while not done():
            if mine is not self._hub:
                self._hub.switch()  # the hub comes back after each event
                continue
            self._next()

    def _next(self) -> None:
        assert self._events, "everybody waits, and nothing is under way"
        self.now, _, call = heapq.heappop(self._events)
        call()
        for waiting in list(self._waiting):
            waiting.switch()

    @property
    def _waiting(self) -> list[greenlet]:
        return [each for each in self._others if not each.dead]

    _others: list[greenlet] = []

    def join(self, other: greenlet) -> None:
        """Let a greenlet that waits be asked again after each event."""
        self._others = [*self._waiting, other]


class VirtualTicket:
    """The receipt of a transfer; has what a `Ticket` has."""

    def __init__(self, clock: VirtualClock, channel: Any, nbytes: float, name: str) -> None:
        self.sums: list[int] = []
        self.channel, self.name = channel, name
        self.left_bytes = self.unfinished_bytes = nbytes
        self._clock = clock

    def done(self) -> bool:
        """Tell whether it has ended."""
        return self.unfinished_bytes <= 0

    def wait(self) -> VirtualTicket:
        """Wait for its end."""
        self._clock.wait_until(self.done)
        return self


class VirtualLink:
    """One direction of the link: transfers one after the other."""

    def __init__(self, clock: VirtualClock, channel: str, bytes_per_s: float) -> None:
        self._clock, self._channel, self._rate = clock, channel, bytes_per_s
        self._free_at = 0.0

    def move(self, nbytes: float, name: str) -> VirtualTicket:
        """Begin a transfer."""
        clock = self._clock
        ticket = VirtualTicket(clock, self._channel, nbytes, name)
        begin = max(clock.now, self._free_at)
        self._free_at = begin + nbytes / self._rate
        clock.note(self._channel, name, begin, self._free_at)

        def end() -> None:
            ticket.left_bytes = ticket.unfinished_bytes = 0

        clock.at(self._free_at, end)
        return ticket


class VirtualFuture(Future[Any]):
    """A result that is waited for in virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def result(self, timeout: float | None = None) -> Any:
        """Wait and return it."""
        self._clock.wait_until(self.done)
        return super().result(timeout)


class VirtualExecutor(Executor):
    """Runs jobs one after the other, in a greenlet."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._jobs: deque[tuple[VirtualFuture, Callable[[], Any]]] = deque()
        worker = greenlet(self._work)
        clock.join(worker)
        worker.switch()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> VirtualFuture:
        """Queue a job."""
        future = VirtualFuture(self._clock)
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        self._clock.at(self._clock.now, lambda: None)  # wakes the worker
        return future

    def _work(self) -> None:
        while True:
            self._clock.wait_until(lambda: bool(self._jobs))
            future, job = self._jobs.popleft()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: there is no thread."""


class VirtualMemory:
    """Bytes that are counted and not there."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class VirtualFrame:
    """A frame without memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory = VirtualMemory(nbytes)
        self.tensor = self

    def in_use(self) -> bool:
        """Return whether views of it live: there are none."""
        return False

    def zero_(self) -> None:
        """Do nothing."""


class VirtualArena:
    """Frames without memory."""

    held_bytes = 0

    def has_free(self, nbytes: int) -> bool:
        """Return whether a frame of that length lies ready."""
        return True

    def alloc(self, nbytes: int) -> VirtualFrame:
        """Make a frame."""
        return VirtualFrame(nbytes)

    def free(self, frame: VirtualFrame) -> None:
        """Take a frame back."""

    def trim(self, nbytes: int | None = None) -> int:
        """Return what was given back to the system: nothing."""
        return 0
