"""A thread's time is in one account at a time, and the accounts add up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from mt_lightning.tiers import spans
from mt_lightning.tiers.ledger import COMPUTE, MEMORY, PAGING, READ, UPDATE, WORK, Ledger, keep
from mt_lightning.tiers.spans import LongSpan, Span, listen


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Heard:
    def __init__(self) -> None:
        self.spans: list[tuple[str, str, int]] = []

    def heard(self, phase: str, what: str, begin_ns: int, end_ns: int, nbytes: int) -> None:
        assert begin_ns <= end_ns
        self.spans.append((phase, what, nbytes))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Iterator[Ledger]:
    ledger = Ledger(clock)
    keep(ledger)
    yield ledger
    keep(None)


def test_the_innermost_account_is_charged(ledger: Ledger, clock: Clock) -> None:
    clock.now_s += 1
    with Span("step", account=COMPUTE):
        clock.now_s += 2
        with Span("bind", account=PAGING), Span("unaccounted"):
            clock.now_s += 4
            with Span("wait", account=READ):
                clock.now_s += 8
        with contextlib.suppress(KeyError), Span("bind", account=PAGING):
            clock.now_s += 16
            raise KeyError
        clock.now_s += 32
    assert ledger.totals() == {None: 1, COMPUTE: 34, PAGING: 20, READ: 8}


def test_a_wait_is_charged_to_what_is_waited_for_in_the_end(ledger: Ledger, clock: Clock) -> None:
    with Span("make room", account=MEMORY), Span("retire", account=UPDATE):
        clock.now_s += 1
        with Span("write", account=READ):
            clock.now_s += 2
    assert ledger.totals() == {None: 0, MEMORY: 3}


def test_totals_include_what_goes_on(ledger: Ledger, clock: Clock) -> None:
    with Span("step", account=COMPUTE):
        clock.now_s += 3
        assert ledger.totals()[COMPUTE] == 3


def test_a_wait_for_a_thread_knows_what_that_one_waits_for(ledger: Ledger, clock: Clock) -> None:
    worker = Ledger(clock)
    worker.switch(READ)
    clock.now_s += 100  # before anybody waits for it
    with Span("wait", account=UPDATE), ledger.blame(worker):
        clock.now_s += 1
        worker.switch(WORK)
        clock.now_s += 2
    assert ledger.totals() == {None: 100, UPDATE: 3}
    assert ledger.behind == {READ: 1, WORK: 2, None: 0}


def test_a_thread_without_a_ledger_is_charged_nowhere(ledger: Ledger, clock: Clock) -> None:
    def work() -> None:
        with Span("step", account=COMPUTE):
            clock.now_s += 1

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ledger.totals() == {None: 1}


def test_spans_are_heard_when_they_end() -> None:
    heard, long = Heard(), LongSpan("backward of")
    with Span("before"):
        listen(heard)
    try:
        with Span("outer", "a"), Span("inner", nbytes=7):
            pass
        long.begin("unit 1")
        long.begin("unit 2")
        long.end()
        long.end()
        assert spans.listening()
    finally:
        listen(None)
    with Span("after"):
        pass
    assert heard.spans == [
        ("inner", "", 7), ("outer", "a", 0), ("backward of", "unit 1", 0),
        ("backward of", "unit 2", 0),
    ]  # fmt: skip
    assert not spans.listening()
