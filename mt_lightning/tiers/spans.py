"""Named stretches of time on any thread: charged to its ledger, shown to whoever listens.

[Note: what listening costs] Where nobody listens, a span is two comparisons and the account of its
time. Torch's profiler sees each as `MegaTrain::<phase> (<what>)`, those of the training thread by
default; a listener of ours sees every thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

from torch.autograd import profiler

from mt_lightning.tiers.ledger import Ledger, mine

P = ParamSpec("P")
T = TypeVar("T")


class Listener(Protocol):
    """Hears of each span when it ends, on the thread that it was on."""

    def heard(self, phase: str, what: str, begin_ns: int, end_ns: int, nbytes: int) -> None:
        """Take note of a span; times are those of `time.perf_counter_ns`."""


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Let `listener` hear of all spans that begin from now on, None: nobody."""
    global _listener
    _listener = listener


def unlisten(listener: Listener) -> None:
    """Let `listener` hear no more; another one that took its place goes on listening."""
    global _listener
    if _listener is listener:
        _listener = None


def listening() -> bool:
    """Return whether anybody listens."""
    return _listener is not None or profiler._is_profiler_enabled


class Span:
    """A stretch of time, as a context manager.

    Args:
        phase: What is done.
        what: What it is done to.
        account: What its time is charged to on a thread that has a ledger; None: to what it was
            charged to before.
        nbytes: Bytes that it moves.
    """

    __slots__ = (
        "_account", "_before", "_begin_ns", "_ledger", "_listener", "_nbytes", "_phase",
        "_recorded", "_what",
    )  # fmt: skip

    def __init__(
        self, phase: str, what: str = "", account: str | None = None, nbytes: int = 0
    ) -> None:
        self._phase = phase
        self._what = what
        self._account = account
        self._nbytes = nbytes
        self._ledger: Ledger | None = None
        self._before: str | None = None
        self._listener: Listener | None = None
        self._begin_ns = 0
        self._recorded: profiler.record_function | None = None

    def __enter__(self) -> None:
        account = self._account
        if account is not None and (ledger := mine()) is not None:
            self._ledger, self._before = ledger, ledger.enter(account)
        if profiler._is_profiler_enabled:
            recorded = self._recorded = profiler.record_function(f"MegaTrain::{_title(self)}")
            recorded.__enter__()
        if _listener is not None:
            self._listener = _listener
            self._begin_ns = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._listener is not None:
            end_ns = time.perf_counter_ns()
            self._listener.heard(self._phase, self._what, self._begin_ns, end_ns, self._nbytes)
            self._listener = None
        if self._recorded is not None:
            self._recorded.__exit__(kind, error, trace)
            self._recorded = None
        if self._ledger is not None:
            self._ledger.switch(self._before)
            self._ledger = None


def _title(span: Span) -> str:
    return f"{span._phase} ({span._what})" if span._what else span._phase


def spanned(phase: str, account: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes each call of a function a span.

    Args:
        phase: What the function does.
        account: What its time is charged to.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with Span(phase, account=account):
                return function(*args, **kwargs)

        return call

    return decorate


class LongSpan:
    """Spans that end where another begins, in a place of their own: unseen by torch's profiler."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._what: str | None = None
        self._begin_ns = 0

    def begin(self, what: str) -> None:
        """End the one before; begin another."""
        self.end()
        if _listener is not None:
            self._what, self._begin_ns = what, time.perf_counter_ns()

    def end(self) -> None:
        """End the one that was begun, if there is one."""
        what, self._what = self._what, None
        if what is not None and _listener is not None:
            _listener.heard(self._phase, what, self._begin_ns, time.perf_counter_ns(), 0)
