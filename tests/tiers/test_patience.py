"""Errors that pass are tried again, a full disk is waited for, and nothing else is."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.advice import FULL, NO_DESCRIPTORS, PASSING
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.commit import CommitLog, CommitRecord
from mt_lightning.tiers.doubles import Fault, FaultyStore, MemoryStore
from mt_lightning.tiers.io import IOQueue, hash_blocks
from mt_lightning.tiers.patience import Patience
from mt_lightning.tiers.steady import SteadyLog, SteadyStore
from mt_lightning.tiers.store import FileStore, Store
from mt_lightning.tiers.watch import Watch

NAME = "p00000.weight.0"
SIZE = 8192
FOR_EVER = 1 << 30
Fill = Callable[..., Frame]


def steady(inner: Store, timeout_s: float = 0.0, **settings: Any) -> SteadyStore:
    settings = {"retry_waits_s": (0.001, 0.001, 0.001), **settings}
    return SteadyStore(inner, Patience(timeout_s, **settings), Watch())


def faulty(fault: Fault, timeout_s: float = 0.0) -> tuple[SteadyStore, MemoryStore]:
    inner = MemoryStore()
    inner.create(NAME, SIZE)
    inner.write_small("small", b"old")
    return steady(FaultyStore(inner, [fault]), timeout_s), inner


def operate(store: Store, op: str, memory: memoryview) -> None:
    {
        "create": lambda: store.create("p00001.weight.0", SIZE),
        "read": lambda: store.read(NAME, 0, memory),
        "write": lambda: store.write(NAME, 0, memory),
        "sync": lambda: store.sync(NAME),
        "replace": lambda: store.replace(NAME),
        "delete": lambda: store.delete(NAME),
        "map_private": lambda: store.map_private(NAME, 0, SIZE),
        "size": lambda: store.size(NAME),
        "read_small": lambda: store.read_small("small"),
        "write_small": lambda: store.write_small("small", b"new"),
    }[op]()


TRIED_AGAIN = [
    "create", "read", "write", "replace", "delete", "map_private", "size", "read_small",
    "write_small",
]  # fmt: skip


@pytest.mark.parametrize("number", sorted(PASSING), ids=errno.errorcode.get)
@pytest.mark.parametrize("op", ["read", "write"])
def test_errors_that_pass_cost_one_warning(
    op: str, number: int, filled: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    store, inner = faulty(Fault(op=op, kind="error", number=number, times=3))
    inner.write(NAME, 0, filled(SIZE).memory)
    frame = filled(SIZE, seed=1)
    expected = filled(SIZE, seed=int(op == "write")).memory
    operate(store, op, frame.memory)
    back = filled(SIZE, seed=2)
    inner.read(NAME, 0, back.memory)
    assert back.memory == frame.memory == expected
    (line,) = caplog.messages
    assert f"{op} of {SIZE} bytes at offset 0 failed and is tried again" in line
    assert NAME in line
    assert os.strerror(number) in line


@pytest.mark.parametrize("op", TRIED_AGAIN)
def test_every_operation_is_tried_four_times(op: str, filled: Fill) -> None:
    store, _ = faulty(Fault(op=op, kind="eio", times=3))
    operate(store, op, filled(SIZE).memory)
    store, _ = faulty(Fault(op=op, kind="eio", times=4))
    with pytest.raises(StorageError, match="Input/output error") as caught:
        operate(store, op, filled(SIZE).memory)
    assert caught.value.errno == errno.EIO
    operate(store, op, filled(SIZE).memory)


@pytest.mark.parametrize(
    "number", sorted((PASSING | FULL) - NO_DESCRIPTORS), ids=errno.errorcode.get
)
def test_a_failed_sync_is_final(
    number: int, filled: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    """A second one could succeed over bytes that the kernel has dropped."""
    store, _ = faulty(Fault(op="sync", kind="error", number=number), timeout_s=9)
    with pytest.raises(StorageError) as caught:
        store.sync(NAME)
    assert caught.value.errno == number
    assert not caplog.messages


@pytest.mark.parametrize(
    "number",
    [errno.EROFS, errno.EBADF, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENODEV, errno.EFBIG],
)
def test_errors_that_stay_are_not_tried_again(
    number: int, filled: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = faulty(Fault(op="write", kind="error", number=number))
    with pytest.raises(StorageError) as caught:
        store.write(NAME, 0, filled(SIZE).memory)
    assert caught.value.errno == number
    assert not caplog.messages


def test_attempts_end_when_the_error_changes_for_the_worse(filled: Fill) -> None:
    faults = [
        Fault(op="write", kind="error", number=errno.EROFS, nth=2),
        Fault(op="write", kind="eio", nth=1),
    ]
    store = steady(FaultyStore(MemoryStore(), faults))
    store.create(NAME, SIZE)
    with pytest.raises(StorageError, match="Read-only"):
        store.write(NAME, 0, filled(SIZE).memory)
    store.write(NAME, 0, filled(SIZE).memory)


def test_slow_failures_are_not_repeated_for_ever(filled: Fill) -> None:
    """A drive may take half a minute for every error."""
    now = iter(range(0, 10_000, 45))
    inner = FaultyStore(MemoryStore(), [Fault(op="write", kind="eio", times=FOR_EVER)])
    store = steady(inner, clock=lambda: float(next(now)), retry_waits_s=(0.0,) * 1000)
    store.create(NAME, SIZE)
    with pytest.raises(StorageError):
        store.write(NAME, 0, filled(SIZE).memory)
    assert inner._num_calls == [2]


def test_corruption_is_no_error_that_passes(tmp_path: Path, filled: Fill) -> None:
    store = steady(FileStore([tmp_path]))
    store.create(NAME, SIZE)
    store.size(NAME)
    os.truncate(tmp_path / "pages" / NAME, 8192)
    for op in ("read", "write", "sync"):
        with pytest.raises(CorruptPageError, match=r"expected 8192, found 4096.*was cut"):
            operate(store, op, filled(SIZE).memory)


# --- a full disk ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", sorted(FULL), ids=errno.errorcode.get)
@pytest.mark.parametrize("op", ["create", "write", "replace", "write_small"])
def test_space_is_waited_for(
    op: str, number: int, filled: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = faulty(Fault(op=op, kind="error", number=number, times=3), timeout_s=60)
    operate(store, op, filled(SIZE).memory)
    pause, again = caplog.messages
    assert "the disk is full" in pause
    assert "The run pauses" in pause
    assert "there is space again" in again


def test_what_is_missing_is_said_with_numbers(
    tmp_path: Path, filled: Fill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def full(*_: Any) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = steady(FileStore([tmp_path]), timeout_s=60)
    monkeypatch.setattr(os, "posix_fallocate", full)
    store.create(NAME, SIZE)
    assert str(tmp_path / "pages" / NAME) in caplog.messages[0]
    assert f"create needs {SIZE} bytes" in caplog.messages[0]
    assert "are free" in caplog.messages[0]


def test_the_deadline_names_itself(filled: Fill) -> None:
    store, _ = faulty(Fault(op="write", kind="enospc", times=FOR_EVER), timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"disk_full_timeout_s=0\.2.*on_existing='resume'") as e:
        store.write(NAME, 0, filled(SIZE).memory)
    assert e.value.errno == errno.ENOSPC
    assert 0.2 <= time.monotonic() - start < 5


def test_zero_fails_at_once(filled: Fill, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = faulty(Fault(op="write", kind="enospc"), timeout_s=0)
    with pytest.raises(StorageError):
        store.write(NAME, 0, filled(SIZE).memory)
    assert not caplog.messages
    store.write(NAME, 0, filled(SIZE).memory)


@pytest.mark.parametrize("how", ["end", "stopping"])
def test_whoever_ends_the_run_ends_the_wait(how: str, filled: Fill) -> None:
    inner = MemoryStore()
    inner.create(NAME, SIZE)
    patience, asked = Patience(600), threading.Event()
    patience.stopping = asked.is_set
    fault = Fault(op="write", kind="enospc", times=FOR_EVER)
    store = SteadyStore(FaultyStore(inner, [fault]), patience, Watch())
    queue = IOQueue(store, num_threads=3)
    frame = filled(SIZE)
    tickets = [queue.write(NAME, [(0, frame.memory)]) for _ in range(5)]
    back = filled(SIZE, seed=1)
    time.sleep(0.1)
    assert not any(ticket.done() for ticket in tickets)
    asked.set() if how == "stopping" else patience.end()
    for ticket in tickets:
        with pytest.raises(StorageError, match="asked to end"):
            ticket.wait()
    queue.read(NAME, [(0, back.memory)]).wait()
    queue.close()


def test_many_that_wait_say_it_once_a_minute(
    filled: Fill, caplog: pytest.LogCaptureFixture
) -> None:
    inner = MemoryStore()
    inner.create(NAME, SIZE)
    fault = Fault(op="write", kind="enospc", times=12)
    now = [0.0]

    def clock() -> float:
        now[0] += 5
        return now[0]

    patience = Patience(1e9, clock=clock)
    queue = IOQueue(SteadyStore(FaultyStore(inner, [fault]), patience, Watch()), num_threads=4)
    frame = filled(SIZE)
    for ticket in [queue.write(NAME, [(0, frame.memory)]) for _ in range(4)]:
        ticket.wait()
    queue.close()
    pauses = [line for line in caplog.messages if "is full" in line]
    assert 1 <= len(pauses) <= 1 + now[0] // 60
    assert any("more operation(s) wait" in line for line in pauses[1:]) or len(pauses) == 1


# --- commit records -----------------------------------------------------------------------------


def record(sequence: int) -> CommitRecord:
    return CommitRecord(sequence=sequence, step=sequence, fingerprint="abc", slots={})


class Calls:
    """Fails calls of the system that are about commit records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, list[int]] = {}
        self.names: list[str] = []
        for name in ("pwrite", "fdatasync", "posix_fallocate"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            self.names.append(name)
            if self.errors.get(name):
                number = self.errors[name].pop(0)
                if name == "fdatasync":
                    call(*arguments)
                raise OSError(number, os.strerror(number))
            return call(*arguments)

        return wrapped


def steady_log(path: Path, timeout_s: float = 0.0) -> SteadyLog:
    return SteadyLog([path], Patience(timeout_s, retry_waits_s=(0.0, 0.0)), Watch())


def test_a_record_is_written_anew_after_a_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, log = Calls(monkeypatch), steady_log(tmp_path)
    log.write(record(1))
    calls.errors["fdatasync"] = [errno.EIO]
    calls.names.clear()
    log.write(record(2))
    assert calls.names == ["pwrite", "fdatasync"] * 2  # the first record reserved both files
    latest = CommitLog([tmp_path]).latest()
    assert latest is not None
    assert latest.sequence == 2


def test_a_record_waits_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, log = Calls(monkeypatch), steady_log(tmp_path, timeout_s=60)
    calls.errors["posix_fallocate"] = [errno.ENOSPC, errno.EDQUOT]
    log.write(record(1))
    latest = CommitLog([tmp_path]).latest()
    assert latest is not None
    assert latest.sequence == 1
    assert "commit record of step 1 needs" in caplog.text


def test_a_record_whose_sync_failed_is_struck_out_before_the_log_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went back to the commit before; its slots will be written over."""
    calls, log = Calls(monkeypatch), steady_log(tmp_path)
    log.write(record(1))
    log.write(record(2))
    calls.errors["fdatasync"] = [errno.EIO] * 3
    with pytest.raises(StorageError, match="stays at the commit before"):
        log.write(record(3))
    calls.errors["fdatasync"] = [errno.EIO]
    with pytest.raises(StorageError, match="cannot strike out"):
        log.latest()
    latest = log.latest()
    assert latest is not None
    assert latest.sequence == 2
    latest = CommitLog([tmp_path]).latest()
    assert latest is not None
    assert latest.sequence == 2
    log.write(record(3))
    latest = CommitLog([tmp_path]).latest()
    assert latest is not None
    assert latest.sequence == 3


# --- file descriptors -------------------------------------------------------------------------


def test_files_that_are_not_in_use_make_room_for_others(
    tmp_path: Path, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = steady(FileStore([tmp_path]), retry_waits_s=(0.0,))
    names = [f"p{index:05}.weight.0" for index in range(9)]
    is_open: set[int] = set()
    system_open, system_close = os.open, os.close

    def few(*arguments: Any, **named: Any) -> int:
        if len(is_open) >= 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        fd = system_open(*arguments, **named)
        is_open.add(fd)
        return fd

    def close(fd: int) -> None:
        system_close(fd)
        is_open.discard(fd)

    monkeypatch.setattr(os, "open", few)
    monkeypatch.setattr(os, "close", close)
    for index, name in enumerate(names):
        store.create(name, SIZE)
        store.write(name, 0, filled(SIZE, seed=index).memory)
        store.sync(name)
    back = filled(SIZE)
    for index, name in enumerate(names):
        store.read(name, 0, back.memory)
        assert back.memory == filled(SIZE, seed=index).memory
    store.close()
    assert not is_open


def test_blocks_of_one_request_are_tried_again_one_by_one(filled: Fill) -> None:
    nbytes = 2 * BLOCK_BYTES + 4096
    inner = MemoryStore()
    inner.create(NAME, nbytes)
    frame, back = filled(nbytes), filled(nbytes, seed=1)
    faults = [
        Fault(op="write", kind="short", nth=2),
        Fault(op="read", kind="short", nth=2),
        Fault(op="read", kind="eio", nth=5),
    ]
    queue = IOQueue(steady(FaultyStore(inner, faults)), num_threads=2)
    sums = queue.write(NAME, [(0, frame.memory)]).wait().sums
    assert sums == hash_blocks(frame.memory)
    queue.read(NAME, [(0, back.memory)], sums=sums).wait()
    assert back.memory == frame.memory
    queue.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_holds_a_failed_sync_is_not_begun_anew(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore([tmp_path])
    store.create(NAME, SIZE)
    num_calls = 0

    def fdatasync(fd: int) -> None:
        nonlocal num_calls
        num_calls += 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(StorageError, match="sync failed"):
        Patience(60, retry_waits_s=(0.001,)).run("a checkpoint", 0, lambda: store.sync(NAME))
    assert num_calls == 1


def test_an_operation_is_given_its_time_once() -> None:
    inner = Patience(0, retry_waits_s=(0.001, 0.001))
    num_calls = 0

    def fails() -> None:
        nonlocal num_calls
        num_calls += 1
        raise StorageError(errno.EIO, "failed", "there")

    with pytest.raises(StorageError, match="failed"):
        Patience(60, retry_waits_s=(0.001,)).run("all", 0, lambda: inner.run("part", 0, fails))
    assert num_calls == 3
