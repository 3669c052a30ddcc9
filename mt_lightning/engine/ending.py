"""What is left of a job when its own work is done: requests under way, and what follows them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from mt_lightning.tiers.uninterrupted import uninterrupted


class Waitable(Protocol):
    """A request under way: a `Ticket`, or one in virtual time."""

    def wait(self) -> object:
        """Wait for its end; raise what it raised."""


def wait_for_all(tickets: Sequence[Waitable | None]) -> None:
    """Wait for the end of every request, then raise the first error."""
    errors: list[Exception] = []
    for ticket in tickets:
        try:
            if ticket is not None:
                ticket.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


class Ending:
    """Waits for requests, then does something once; any thread may wait, as often as it likes.

    Args:
        tickets: The requests.
        apply: What is done when all of them have ended well; it is short, and never fails.

    Attributes:
        over: Whether all has ended and been applied, or something has failed.
    """

    def __init__(self, tickets: Sequence[Waitable | None], apply: Callable[[], None]) -> None:
        self._tickets = tickets
        self._apply = apply
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self.over = False

    def wait(self) -> None:
        """Wait for the end of every request, well or not, and apply what follows.

        Raises:
            StorageError: The first error of a request; nothing is applied.
        """
        if not self.over:
            error = None
            try:
                wait_for_all(self._tickets)  # an interrupt ends this wait, and all is as before
            except Exception as raised:
                error = raised
            with uninterrupted(), self._lock:
                if not self.over:
                    if error is None:
                        self._apply()
                    self._error, self.over = error, True
                    # What it refers to are pages and their memory.
                    self._tickets, self._apply = (), _nothing
        if self._error is not None:
            raise self._error


def _nothing() -> None:
    pass
