"""Blocks moved by a few threads: reads that are verified, writes that are summed.

[Note: No closures queue up] A ticket of many gigabytes is one entry in the queue; a thread cuts its
next block from it when it is free. So submitting never blocks the caller, at most one operation per
thread is in flight, and what waits costs no memory beyond the list of pieces.

[Note: lanes] Each drive has threads of its own, some for reads and some for writes: else a large
write to one drive would keep every thread from another drive, and from the pages that training
waits for on the same one, while most drives read and write at once.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import xxhash

from mt_lightning.errors import CorruptPageError, MegaTrainError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.ledger import READ, WRITE
from mt_lightning.tiers.spans import Span
from mt_lightning.tiers.store import Store
from mt_lightning.tiers.uninterrupted import uninterrupted

logger = logging.getLogger(__name__)

Piece = tuple[int, memoryview]
"""Payload offset and buffer."""


Operation = Callable[[], None]


def hash_blocks(memory: memoryview) -> list[int]:
    """Return the xxh3_64 of each block of `BLOCK_BYTES`; the last may be shorter."""
    return [xxhash.xxh3_64_intdigest(block) for _, block in _Blocks([(0, memory)])]


class _Blocks:
    """Pieces cut into blocks, one at a time."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [(offset, buffer.cast("B")) for offset, buffer in pieces]

    def __len__(self) -> int:
        return sum(-(-buffer.nbytes // BLOCK_BYTES) for _, buffer in self._pieces)

    def __iter__(self) -> Iterator[Piece]:
        for offset, buffer in self._pieces:
            for start in range(0, buffer.nbytes, BLOCK_BYTES):
                yield offset + start, buffer[start : start + BLOCK_BYTES]


class Ticket:
    """The receipt of a request.

    Attributes:
        kind: "read", "write" or "sync".
        name: of the payload, empty where there are several.
        lane: the drive, and the kind of its threads that run it: "read" or "write".
        sums: of a write, once it is done: the xxh3_64 of each block of each piece, in order.
        num_unstarted: operations that no thread has taken yet.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        drive: int,
        operations: Iterator[Operation],
        num_operations: int,
        sums: list[int],
    ) -> None:
        """Describe a request; made by `IOQueue`."""
        self.kind = kind
        self.name = name
        self.lane = drive, "read" if kind == "read" else "write"
        self.sums = sums
        self.error_was_read = False
        self._operations: Iterator[Operation] | None = operations
        self.num_unstarted = num_operations
        self._num_unfinished = num_operations
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._finished = threading.Event()
        if not num_operations:
            self._operations = None
            self._finished.set()

    def done(self) -> bool:
        """Tell whether every operation has ended, well or not."""
        return self._finished.is_set()

    def wait(self) -> Ticket:
        """Block until every operation has ended.

        Returns:
            This ticket.

        Raises:
            StorageError: the first error of the request (or whatever else it raised).
        """
        if not self._finished.is_set():
            account = READ if self.kind == "read" else WRITE
            with Span(f"wait for {self.kind}", self.name, account):
                self._finished.wait()
        if self._error is not None:
            self.error_was_read = True
            raise self._error
        return self

    @property
    def failed(self) -> bool:
        """Whether an operation has raised."""
        return self._error is not None

    def _next(self) -> tuple[Operation, bool]:
        """Cut off the next operation; also tell whether it is the last. Called under the lock."""
        assert self._operations is not None
        operation = next(self._operations)
        self.num_unstarted -= 1
        if not self.num_unstarted:
            self._operations = None  # it refers to the caller's buffers
        return operation, not self.num_unstarted

    def _end(self, error: BaseException | None) -> bool:
        """Count one operation as ended; return True for the first error."""
        with self._lock:
            first = error is not None and self._error is None
            if first:
                self._error = error
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self._finished.set()
            return first


class _Lane:
    """Requests of one kind on one drive, in order, and the threads that run them."""

    def __init__(self, lock: threading.Lock) -> None:
        self.waiting: deque[Ticket] = deque()
        self.changed = threading.Condition(lock)
        self.threads: list[threading.Thread] = []


class IOQueue:
    """Threads that move blocks between buffers and a store; see the note on lanes.

    Requests run in parallel with each other, those of a lane in their order: what must happen after
    a request must be asked for after its `wait`. A buffer belongs to the queue from the request to
    the end of its ticket.

    Attributes:
        num_threads: Operations in flight in each lane.
    """

    def __init__(
        self,
        store: Store,
        num_threads: int = 4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start without threads; a lane's are started with its first request.

        Args:
            store: where bytes lie.
            num_threads: operations in flight in each lane; two to four saturate a drive.
            clock: seconds, for `busy_s`.
        """
        self.num_threads = num_threads
        self._store = store
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._closed = False
        self._failures: list[Ticket] = []
        self._clock = clock
        self._num_busy: dict[str, int] = {"read": 0, "write": 0, "sync": 0}
        self._busy_since_s = dict.fromkeys(self._num_busy, 0.0)
        self._busy_s = dict.fromkeys(self._num_busy, 0.0)

    def read(self, name: str, pieces: Sequence[Piece], sums: Sequence[int] | None = None) -> Ticket:
        """Ask for bytes.

        Args:
            name: which payload.
            pieces: where in it, and the buffers to fill.
            sums: the xxh3_64 of each block of each piece, in order; None reads unverified. A block
                that differs is read once more; if it still differs the ticket fails with
                `CorruptPageError`.
        """
        blocks = _Blocks(pieces)
        assert sums is None or len(sums) == len(blocks), (name, len(blocks), len(sums))
        return self._submit(
            "read",
            name,
            self._store.drive_of(name),
            len(blocks),
            (
                partial(
                    _read_block,
                    self._store,
                    name,
                    offset,
                    block,
                    None if sums is None else int(sums[index]),
                )
                for index, (offset, block) in enumerate(blocks)
            ),
        )

    def write(self, name: str, pieces: Sequence[Piece]) -> Ticket:
        """Ask to write bytes; they must not change before the ticket is done."""
        blocks = _Blocks(pieces)
        sums = [0] * len(blocks)
        return self._submit(
            "write",
            name,
            self._store.drive_of(name),
            len(blocks),
            (
                partial(_write_block, self._store, name, offset, block, sums, index)
                for index, (offset, block) in enumerate(blocks)
            ),
            sums,
        )

    def sync(self, names: Iterable[str]) -> Ticket:
        """Ask to make payloads durable: all their writes whose tickets are done."""
        todo = list(names)
        operations = (partial(_sync, self._store, name) for name in todo)
        drive = self._store.drive_of(todo[0]) if todo else 0
        return self._submit("sync", "", drive, len(todo), operations)

    def hurry(self, ticket: Ticket) -> None:
        """Let a request go before all others of its lane that have not begun."""
        with self._lock:
            if ticket.num_unstarted:
                waiting = self._lanes[ticket.lane].waiting
                if waiting[0] is not ticket:
                    waiting.remove(ticket)
                    waiting.appendleft(ticket)

    @property
    def num_queued(self) -> int:
        """How many operations wait for a thread."""
        with self._lock:
            return sum(
                ticket.num_unstarted for lane in self._lanes.values() for ticket in lane.waiting
            )

    def busy_s(self, kind: str) -> float:
        """Return for how long at least one operation of a kind has been in flight, in seconds."""
        with self._lock:
            open_s = self._clock() - self._busy_since_s[kind] if self._num_busy[kind] else 0.0
            return self._busy_s[kind] + open_s

    def check(self) -> None:
        """Raise the first error that nobody has read from its ticket."""
        with self._lock:
            self._failures = [ticket for ticket in self._failures if not ticket.error_was_read]
            unread = self._failures[0] if self._failures else None
        if unread is not None:
            unread.wait()

    def close(self) -> None:
        """Finish every request, end the threads, then `check`."""
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.changed.notify_all()
        for lane in self._lanes.values():
            for thread in lane.threads:
                thread.join()
        self.check()

    def _submit(
        self,
        kind: str,
        name: str,
        drive: int,
        num_operations: int,
        operations: Iterator[Operation],
        sums: list[int] | None = None,
    ) -> Ticket:
        ticket = Ticket(kind, name, drive, operations, num_operations, sums or [])
        with self._lock:
            assert not self._closed, "the I/O queue is closed"
            # An error that was raised refers to the frames it passed, and they to tensors.
            self._failures = [each for each in self._failures if not each.error_was_read]
            if not ticket.done():
                lane = self._lanes.get(ticket.lane) or self._open(ticket.lane)
                lane.waiting.append(ticket)
                lane.changed.notify_all()
        return ticket

    def _open(self, key: tuple[int, str]) -> _Lane:
        """Start a lane. Called under the lock."""
        drive, verb = key
        with uninterrupted():
            lane = self._lanes[key] = _Lane(self._lock)
            for i in range(self.num_threads):
                name = f"megatrain-io-{verb}-{drive}-{i}"
                thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
                lane.threads.append(thread)
                thread.start()
        return lane

    def _work(self, lane: _Lane) -> None:
        while self._work_once(lane):
            pass

    def _work_once(self, lane: _Lane) -> bool:
        """Run one operation; a function of its own so that no local outlives the operation."""
        with self._lock:
            while not lane.waiting:
                if self._closed:
                    return False
                lane.changed.wait()
            ticket = lane.waiting[0]
            operation, last = ticket._next()
            if last:
                lane.waiting.popleft()
            kind = ticket.kind
            if not self._num_busy[kind]:
                self._busy_since_s[kind] = self._clock()
            self._num_busy[kind] += 1
        error: BaseException | None = None
        if not ticket.failed:  # the rest of a failed request is not worth the drive's time
            try:
                operation()
            except BaseException as raised:
                error = _without_frames(raised)
        del operation  # before the caller is told: it refers to the caller's buffers
        with self._lock:
            self._num_busy[kind] -= 1
            if not self._num_busy[kind]:
                self._busy_s[kind] += self._clock() - self._busy_since_s[kind]
            if ticket._end(error):
                self._failures.append(ticket)
        return True


def _read_block(
    store: Store, name: str, offset: int, block: memoryview, expected: int | None
) -> None:
    with Span("read", name, nbytes=block.nbytes):
        store.read(name, offset, block)
        if expected is None or xxhash.xxh3_64_intdigest(block) == expected:
            return
    store.read(name, offset, block)
    found = xxhash.xxh3_64_intdigest(block)
    where = f"{block.nbytes} bytes at offset {offset}"
    if found != expected:
        raise CorruptPageError(
            errno.EBADMSG,
            f"checksum of {where} is {found:016x} instead of {expected:016x}, twice; the drive "
            "returned other bytes than were written; check it, or give another offload_dir",
            name,
        )
    logger.warning(
        "%s: %s had a wrong checksum and were right when read again: suspect the drive or its "
        "driver.",
        name,
        where,
    )


def _write_block(
    store: Store, name: str, offset: int, block: memoryview, sums: list[int], index: int
) -> None:
    with Span("write", name, nbytes=block.nbytes):
        # Summed first: if the buffer changes under the write, the next read finds out.
        sums[index] = xxhash.xxh3_64_intdigest(block)
        store.write(name, offset, block)


def _sync(store: Store, name: str) -> None:
    with Span("sync", name):
        store.sync(name)


def _without_frames(error: BaseException) -> BaseException:
    """Drop tracebacks: their frames would hold the buffers for as long as the error lives.

    Errors of the kit say in their text where they happened. Any other is a bug and keeps its own.
    """
    link: BaseException | None = error if isinstance(error, MegaTrainError) else None
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
