"""Where the time of a thread goes: at any moment into exactly one account.

[Note: exclusive accounts] A thread that pages has a ledger. Code says what it spends time on, and
what it calls may say so in turn; each moment is charged to the innermost account. A wait is the
exception: it is charged to the outermost one, because who waits for memory waits for memory,
whatever has to end for it. So the accounts of a thread add up to its time, and nothing counts
twice. Time outside all of them is that of other code: the loop, its hooks, the data loader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]

COMPUTE = "compute"
"""Code of the model: forward, backward, loss."""
RECOMPUTE = "recompute"
"""Units that run again in backward."""
PAGING = "paging"
"""Work of the kit on the training thread: predicting, binding, taking gradients."""
READ = "read"
"""Waiting for bytes of the drive."""
WRITE = "write"
"""Waiting until the drive has taken bytes, or made them durable."""
MEMORY = "memory"
"""Waiting for somebody to give memory back."""
DEVICE = "device"
"""Waiting for bytes on their way to the device."""
UPDATE = "update"
"""Waiting for the update worker, or doing its work on the training thread."""
WORK = "work"
"""What another thread than the training thread is there for."""

WAITS = frozenset((READ, WRITE, MEMORY, DEVICE, UPDATE))

Totals = dict[str | None, float]


class Ledger:
    """The accounts of one thread; any thread may read them.

    Args:
        clock: Seconds that only grow.

    Attributes:
        behind: Seconds spent waiting for another thread, by what that one waited for meanwhile.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._account: str | None = None
        self._since = clock()
        self._totals: Totals = {}
        self.behind: Totals = {}

    @property
    def account(self) -> str | None:
        """What time is charged to now, None outside of all accounts."""
        return self._account

    def enter(self, account: str) -> str | None:
        """Charge what follows to `account`, unless it is part of a wait.

        Returns:
            The account before, to `switch` back to.
        """
        current = self._account
        return self.switch(current if current in WAITS else account)

    def switch(self, account: str | None) -> str | None:
        """Charge what follows to `account`; return the one before."""
        now = self._clock()
        with self._lock:
            before = self._account
            self._totals[before] = self._totals.get(before, 0.0) + now - self._since
            self._account, self._since = account, now
        return before

    def totals(self) -> Totals:
        """Return the seconds of each account until now; None stands for all other code."""
        now = self._clock()
        with self._lock:
            totals = dict(self._totals)
            totals[self._account] = totals.get(self._account, 0.0) + now - self._since
        return totals

    def blame(self, other: Ledger) -> Blame:
        """Return a context in which this thread waits for that of `other`."""
        return Blame(self, other)

    @contextmanager
    def waits_behind(self, account: str) -> Iterator[None]:
        """Return a context in which this thread waits for what another one has begun.

        Args:
            account: What that other thread would be charged with if it waited itself.
        """
        begin = self._clock()
        try:
            yield
        finally:
            spent_s = self._clock() - begin
            self.behind[account] = self.behind.get(account, 0.0) + spent_s


class Blame:
    """A wait for another thread; made by `Ledger.blame`."""

    __slots__ = ("_before", "_ledger", "_other")

    def __init__(self, ledger: Ledger, other: Ledger) -> None:
        self._ledger = ledger
        self._other = other
        self._before: Totals = {}

    def __enter__(self) -> None:
        self._before = self._other.totals()

    def __exit__(self, *_: object) -> None:
        behind = self._ledger.behind
        for account, seconds in self._other.totals().items():
            spent_s = seconds - self._before.get(account, 0.0)
            behind[account] = behind.get(account, 0.0) + spent_s


_of_thread = threading.local()


def keep(ledger: Ledger | None) -> None:
    """Let the calling thread have this ledger from now on, None for none."""
    _of_thread.ledger = ledger


def mine() -> Ledger | None:
    """Return the ledger of the calling thread, None where it has none."""
    return getattr(_of_thread, "ledger", None)
