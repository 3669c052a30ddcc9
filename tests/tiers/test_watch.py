"""What takes too long is named: which tier, since when, and how much waits behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
import torch

from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.delayed import DelayedLink
from mt_lightning.tiers.doubles import MemoryStore, ThrottledStore
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.patience import Patience
from mt_lightning.tiers.steady import SteadyStore, WatchedLink
from mt_lightning.tiers.watch import Watch

Fill = Callable[..., Frame]


def test_warnings_are_spaced_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    watch = Watch(30, clock=lambda: now[0])
    told = []
    with watch.over("the sync of p1"):
        for second in range(0, 500, 5):
            now[0] = float(second)
            caplog.clear()
            watch.check()
            if caplog.messages:
                told.append(second)
    assert told == [30, 60, 120, 240, 480]
    assert caplog.messages[-1] == "the sync of p1 ended after 495 s."


def test_what_is_quick_is_never_named(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    watch = Watch(30, clock=lambda: now[0])
    for _ in range(100):
        with watch.over("a read"):
            now[0] += 29
            watch.check()
    watch.check()
    assert not caplog.messages
    assert not watch._under_way


def test_what_raises_is_no_longer_watched() -> None:
    watch = Watch(30)
    with pytest.raises(ZeroDivisionError), watch.over("a read"):
        raise ZeroDivisionError
    assert not watch._under_way


def test_a_slow_drive_is_named_with_its_queue(
    filled: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen by the thread of the watch itself, while everybody else waits."""
    gate, before = threading.Event(), set(threading.enumerate())
    store = MemoryStore()
    store.create("p00000.weight.0", 8192)
    slow = ThrottledStore(store, 1e3, 1e3, sleep=lambda seconds: gate.wait(10))
    watch = Watch(0.05)
    queue = IOQueue(SteadyStore(slow, Patience(), watch), num_threads=2)
    watch.queued = lambda: queue.num_queued
    watch.start()
    frame = filled(8192)
    with caplog.at_level(logging.WARNING):
        tickets = [queue.read("p00000.weight.0", [(4096, frame.memory[:4096])]) for _ in range(7)]
        deadline = time.monotonic() + 10
        while len(caplog.messages) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.set()
        for ticket in tickets:
            ticket.wait()
    queue.close()
    watch.close()
    assert "read of 4096 bytes at offset 4096, p00000.weight.0, has taken" in caplog.messages[0]
    assert "2 operation(s) are under way and 5 blocks wait" in caplog.messages[0]
    assert "ended after" in caplog.text
    after = set(threading.enumerate()) - before
    assert not any(thread.name == "megatrain-watch" for thread in after)


def test_a_slow_device_is_named(filled: Fill, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]

    class Slow(DelayedLink):
        def _run(self, op: object) -> None:
            now[0] += 40
            watch.check()
            super()._run(op)  # type: ignore[arg-type]

    watch = Watch(30, clock=lambda: now[0])
    link = WatchedLink(Slow(), watch)
    device = link.wait(link.upload(filled(4096).tensor, link.frame(4096)))
    assert device.equal(filled(4096).tensor)
    assert "a copy of 4096 bytes to the device has taken 40 s" in caplog.text
    into = torch.empty(4096, dtype=torch.uint8)
    assert link.done(link.download(device.clone(), into)).equal(filled(4096).tensor)
    assert "a copy from the device has taken 40 s" in caplog.text
    link.close()
