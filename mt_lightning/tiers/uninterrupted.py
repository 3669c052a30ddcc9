"""Ctrl-C that waits: a few lines that have to be done whole or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_waiting = threading.Event()


def interrupt_waits() -> bool:
    """Return whether a Ctrl-C came that does not count yet: nobody should wait for a drive then."""
    return _waiting.is_set()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a Ctrl-C count when the block has ended, which must be soon.

    Python hands signals to the main thread, so elsewhere there is nothing to do; nor where the
    handler was not set by Python, which could not be put back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        _waiting.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        came = False
        try:
            signal.signal(signal.SIGINT, before)
            came = _waiting.is_set()
        finally:
            # A second one may come as the handler is put back; it counts for both.
            _waiting.clear()
        if came:
            signal.raise_signal(signal.SIGINT)
