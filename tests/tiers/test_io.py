from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.arena import Arena, Frame
from mt_lightning.tiers.doubles import Fault, FaultyStore, MemoryStore
from mt_lightning.tiers.io import IOQueue, hash_blocks
from mt_lightning.tiers.store import FileStore

NAME = "p00000.weight.0"
SIZE = 2 * BLOCK_BYTES + 12288
Fill = Callable[..., Frame]


def test_roundtrip_in_pieces_with_sums(tmp_path: Path, filled: Fill) -> None:
    store = FileStore([tmp_path])
    store.create(NAME, SIZE)
    queue = IOQueue(store)
    good, back = filled(SIZE), filled(SIZE, seed=1)
    written = queue.write(NAME, [(0, good.memory)]).wait()
    assert written.done()
    assert written.sums == hash_blocks(good.memory)
    assert len(written.sums) == 3
    queue.sync([NAME]).wait()
    queue.read(NAME, [(0, back.memory)], sums=written.sums).wait()
    assert back.memory == good.memory
    cut = BLOCK_BYTES + 4096
    pieces = [(cut, back.memory[cut:]), (0, back.memory[:cut])]
    sums = [*hash_blocks(good.memory[cut:]), *hash_blocks(good.memory[:cut])]
    assert len(sums) == 4
    back.memory[:] = bytes(SIZE)
    queue.read(NAME, pieces, sums=sums).wait()
    assert back.memory == good.memory
    queue.close()


def test_empty_requests_are_done(filled: Fill) -> None:
    queue = IOQueue(MemoryStore(), num_threads=1)
    assert queue.read(NAME, []).wait().done()
    assert queue.sync([]).wait().done()
    assert hash_blocks(memoryview(b"")) == []
    queue.close()


def make(faults: list[Fault], filled: Fill) -> tuple[IOQueue, list[int]]:
    store = FaultyStore(MemoryStore(), faults)
    store.create(NAME, SIZE)
    store.write(NAME, 0, filled(SIZE).memory)
    return IOQueue(store, num_threads=2), hash_blocks(filled(SIZE).memory)


def test_lasting_corruption_is_found(filled: Fill) -> None:
    queue, sums = make([Fault(op="read", kind="flip", nth=0)], filled)
    ticket = queue.read(NAME, [(BLOCK_BYTES, filled(BLOCK_BYTES).memory)], sums=sums[1:2])
    with pytest.raises(CorruptPageError, match=f"checksum.*offset {BLOCK_BYTES}") as caught:
        ticket.wait()
    assert caught.value.filename == NAME
    queue.close()


def test_passing_corruption_is_read_again(filled: Fill, caplog: pytest.LogCaptureFixture) -> None:
    queue, sums = make([Fault(op="read", kind="flip", nth=1)], filled)
    back = filled(SIZE, seed=1)
    with caplog.at_level(logging.WARNING):
        queue.read(NAME, [(0, back.memory)], sums=sums).wait()
    assert back.memory == filled(SIZE).memory
    assert "right when read again" in caplog.text
    queue.close()


def test_write_errors_reach_the_waiter(filled: Fill) -> None:
    queue, _ = make([Fault(op="write", kind="enospc", nth=3)], filled)
    frame = filled(SIZE)
    ticket = queue.write(NAME, [(0, frame.memory)])
    with pytest.raises(StorageError, match="write failed"):
        ticket.wait()
    with pytest.raises(StorageError, match="write failed"):
        ticket.wait()
    queue.check()  # it was read
    queue.write(NAME, [(0, frame.memory)]).wait()
    queue.close()


def test_unread_errors_do_not_vanish(filled: Fill) -> None:
    queue, _ = make([Fault(op="sync", kind="eio", nth=0)], filled)
    read = queue.sync([NAME])
    with pytest.raises(StorageError):
        read.wait()
    queue.sync([NAME])
    with pytest.raises(StorageError, match="sync failed"):
        queue.close()
    queue.check()


def test_any_exception_reaches_the_waiter(filled: Fill) -> None:
    queue, _ = make([], filled)
    ticket = queue.read(NAME, [(1, filled(4096).memory)])
    with pytest.raises(AssertionError):
        ticket.wait()
    queue.read(NAME, [(0, filled(4096).memory)]).wait()
    queue.close()


def test_submitting_never_blocks_and_close_finishes(filled: Fill) -> None:
    gate = threading.Event()

    class Gated(MemoryStore):
        def write(self, name: str, offset: int, buffer: memoryview) -> None:
            assert gate.wait(10)
            super().write(name, offset, buffer)

    store = Gated()
    store.create(NAME, SIZE)
    queue = IOQueue(store, num_threads=2)
    frame = filled(SIZE)
    tickets = [queue.write(NAME, [(0, frame.memory)]) for _ in range(50)]
    assert not any(ticket.done() for ticket in tickets)
    gate.set()
    queue.close()
    assert all(ticket.done() for ticket in tickets)
    assert store.bytes_written == 50 * SIZE
    with pytest.raises(AssertionError, match="closed"):
        queue.write(NAME, [(0, frame.memory)])


@pytest.mark.parametrize("faults", [[], [Fault(op="read", kind="flip", nth=0)]])
def test_a_done_ticket_holds_no_buffer(filled: Fill, faults: list[Fault]) -> None:
    queue, sums = make(faults, filled)
    arena = Arena()
    for _ in range(20):
        frame = arena.alloc(SIZE)
        ticket = queue.read(NAME, [(0, frame.memory)], sums=sums)
        try:
            ticket.wait()
        except CorruptPageError:
            assert faults
        arena.free(frame)
        del frame
        arena.trim()
        assert ticket.done()
    queue.close()


class Gate(MemoryStore):
    """Notes what is read, and reads nothing before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.begun = threading.Event()
        self.order: list[str] = []

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        self.order.append(name)
        self.begun.set()
        assert self.opened.wait(60)
        super().read(name, offset, buffer)


def test_what_is_waited_for_goes_before_what_was_asked_for_sooner(filled: Fill) -> None:
    store, frame = Gate(), filled(4096)
    for name in "abcd":
        store.create(name, 4096)
    queue = IOQueue(store, num_threads=1)
    tickets = {name: queue.read(name, [(0, frame.memory)]) for name in "abcd"}
    assert store.begun.wait(60)
    for name in "acc":  # one that is under way, one that waits, one that is first already
        queue.hurry(tickets[name])
    store.opened.set()
    for ticket in tickets.values():
        ticket.wait()
    queue.hurry(tickets["b"])
    queue.close()
    assert store.order == ["a", "c", "b", "d"]


class Turnstile(MemoryStore):
    """Lets one operation through at a time, and notes which ones have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.turns = threading.Semaphore(0)

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        self.order.append("read")
        assert self.turns.acquire(timeout=60)
        super().read(name, offset, buffer)

    def write(self, name: str, offset: int, buffer: memoryview) -> None:
        self.order.append("write")
        assert self.turns.acquire(timeout=60)
        super().write(name, offset, buffer)


def begun(store: Turnstile, count: int) -> list[str]:
    """Wait until `count` operations have begun; return them."""
    for _ in range(6000):
        if len(store.order) >= count:
            break
        time.sleep(0.01)
    return store.order


def test_writes_do_not_delay_reads_and_reads_do_not_stop_writes(filled: Fill) -> None:
    store, frame = Turnstile(), filled(4096)
    store.create("a", 4096)
    queue = IOQueue(store, num_threads=3)
    writes = [queue.write("a", [(0, frame.memory)]) for _ in range(20)]
    assert begun(store, 3) == ["write"] * 3
    reads = [queue.read("a", [(0, frame.memory)]) for _ in range(6)]
    assert begun(store, 6)[3:] == ["read"] * 3
    store.turns.release(100)
    for ticket in (*writes, *reads):
        ticket.wait()
    assert (store.order.count("read"), store.order.count("write")) == (6, 20)
    assert queue.busy_s("read") > 0
    assert queue.busy_s("sync") == 0
    queue.close()


class Drives(Gate):
    """One drive for each name."""

    def drive_of(self, name: str) -> int:
        return ord(name[0])


def test_no_drive_waits_for_another_one_nor_reads_for_writes(filled: Fill) -> None:
    store, frame = Drives(), filled(SIZE)
    for name in "ab":
        store.create(name, SIZE)
    queue = IOQueue(store, num_threads=1)
    stuck = queue.read("a", [(0, frame.memory)])
    assert store.begun.wait(60)
    queue.write("a", [(0, frame.memory)]).wait()  # the same drive, while it reads
    other = queue.read("b", [(0, frame.memory)])
    while "b" not in store.order:
        assert not stuck.done()
        other._finished.wait(0.001)
    store.opened.set()
    stuck.wait()
    other.wait()
    queue.close()


def test_directories_on_one_device_are_one_drive(tmp_path: Path) -> None:
    store = FileStore([tmp_path / "a", tmp_path / "b"])
    for number in range(4):
        store.create(f"p{number:05d}.weight.0", 4096)
    assert {path.parent.parent.name for path in map(store.path_of, store.names())} == {"a", "b"}
    assert {store.drive_of(name) for name in store.names()} == {tmp_path.stat().st_dev}
    store.close()
