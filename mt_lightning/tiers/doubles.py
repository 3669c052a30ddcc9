"""Stand-ins for files: in memory, throttled, faulty. For tests and simulations."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.address import map_anonymous
from mt_lightning.tiers.checks import check_name, check_piece, check_size
from mt_lightning.tiers.commit import CommitRecord
from mt_lightning.tiers.mapping import PrivateMapping
from mt_lightning.tiers.store import Store
from mt_lightning.tiers.wrapped import WrappedStore

T = TypeVar("T")


class MemoryStore(Store):
    """Payloads in memory. A private mapping is a copy."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Make an empty store that refuses (ENOSPC) to hold more than `capacity_bytes`."""
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._payloads: dict[str, bytearray] = {}
        self._small: dict[str, bytes] = {}
        self._bytes_read = 0
        self._bytes_written = 0

    @property
    def bytes_read(self) -> int:
        """Payload bytes read so far."""
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Payload bytes written so far."""
        return self._bytes_written

    def create(self, name: str, nbytes: int) -> None:
        """See `Store.create`."""
        check_name(name)
        check_size(name, nbytes)
        with self._lock:
            if name in self._payloads:
                if len(self._payloads[name]) != nbytes:
                    raise CorruptPageError(
                        None,
                        f"payload bytes differ (expected {nbytes}, "
                        f"found {len(self._payloads[name])})",
                        name,
                    )
                return
            held_bytes = sum(map(len, self._payloads.values()))
            if self._capacity_bytes is not None and held_bytes + nbytes > self._capacity_bytes:
                raise StorageError(
                    errno.ENOSPC,
                    f"cannot reserve {nbytes} bytes: {held_bytes} of {self._capacity_bytes} taken",
                    name,
                )
            self._payloads[name] = bytearray(nbytes)

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return name in self._payloads

    def names(self) -> list[str]:
        """See `Store.names`."""
        return sorted(self._payloads)

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return len(self._payload(name))

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read`."""
        payload = self._payload(name)
        data = check_piece(name, len(payload), offset, buffer)
        data[:] = memoryview(payload)[offset : offset + data.nbytes]
        with self._lock:
            self._bytes_read += data.nbytes

    def write(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.write`."""
        payload = self._payload(name)
        data = check_piece(name, len(payload), offset, buffer)
        payload[offset : offset + data.nbytes] = data
        with self._lock:
            self._bytes_written += data.nbytes

    def sync(self, name: str) -> None:
        """See `Store.sync`."""
        self._payload(name)

    def replace(self, name: str, *, keep: bool = False) -> None:
        """See `Store.replace`."""
        old = self._payload(name)
        self._payloads[name] = bytearray(old if keep else len(old))

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self._payload(name)
        del self._payloads[name]

    def map_private(self, name: str, offset: int, nbytes: int) -> PrivateMapping:
        """See `Store.map_private`."""
        assert 0 <= offset < offset + nbytes <= self.size(name), (name, offset, nbytes)
        return PrivateMapping.of_bytes(bytes(self._payload(name)[offset : offset + nbytes]))

    def read_small(self, name: str) -> bytes | None:
        """See `Store.read_small`."""
        return self._small.get(name)

    def write_small(self, name: str, data: bytes) -> None:
        """See `Store.write_small`."""
        check_name(name)
        self._small[name] = bytes(data)

    def close(self) -> None:
        """See `Store.close`."""

    def _payload(self, name: str) -> bytearray:
        try:
            return self._payloads[name]
        except KeyError:
            raise StorageError(errno.ENOENT, "no such payload", name) from None


class ThrottledStore(WrappedStore):
    """A store behind a drive of a given speed, which all threads share."""

    def __init__(
        self,
        inner: Store,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Slow a store down.

        Args:
            inner: does the work, in a time that is not counted.
            read_bytes_per_s: speed of reads; infinity for no delay.
            write_bytes_per_s: speed of writes; independent of reads.
            sleep: called with the seconds of each operation, one at a time per direction.
        """
        super().__init__(inner)
        self._speeds = {"read": read_bytes_per_s, "write": write_bytes_per_s}
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        self._sleep = sleep

    def _run(self, op: str, name: str, nbytes: int, call: Callable[[], T], offset: int = 0) -> T:
        if op in self._speeds:
            with self._locks[op]:
                self._sleep(nbytes / self._speeds[op])
        return call()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    op: str
    """Name of the `Store` method: "create", "read", "write", "sync", "replace", ..."""
    kind: Literal["eio", "short", "flip", "enospc", "slow", "error"]
    """"eio"/"enospc": raise, nothing done. "short": half of a read or write done, then raise.
    "flip": a read or write succeeds with one bit wrong. "slow": `delay_s` late. "error": raise
    `number`."""
    name_pattern: str = "*"
    """Which names, as a shell pattern."""
    nth: int = 1
    """Which matching call (counted from 1, over all threads); 0 means every one."""
    times: int = 1
    """How many calls in a row, from that one on."""
    number: int = errno.EIO
    """The errno of kind "error"."""
    delay_s: float = 0.05


class FaultyStore(WrappedStore):
    """A store on which chosen operations fail."""

    def __init__(self, inner: Store, faults: Sequence[Fault]) -> None:
        """Let `faults` happen to `inner`."""
        super().__init__(inner)
        self._faults = list(faults)
        self._num_calls = [0] * len(self._faults)
        self._count_lock = threading.Lock()

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Read, unless a fault is due."""
        kinds = self._meet("read", name)
        if "short" in kinds:
            half_bytes = buffer.nbytes // 2 // ALIGN_BYTES * ALIGN_BYTES
            self.inner.read(name, offset, buffer.cast("B")[:half_bytes])
            raise _short("read", name, offset, buffer.nbytes, half_bytes)
        self.inner.read(name, offset, buffer)
        if "flip" in kinds:
            buffer.cast("B")[buffer.nbytes // 2] ^= 1

    def write(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write, unless a fault is due."""
        kinds = self._meet("write", name)
        if "short" in kinds:
            half_bytes = buffer.nbytes // 2 // ALIGN_BYTES * ALIGN_BYTES
            self.inner.write(name, offset, buffer.cast("B")[:half_bytes])
            raise _short("write", name, offset, buffer.nbytes, half_bytes)
        if "flip" in kinds:
            copy = memoryview(map_anonymous(buffer.nbytes)).cast("B")
            copy[:] = buffer.cast("B")
            copy[buffer.nbytes // 2] ^= 1
            buffer = copy
        self.inner.write(name, offset, buffer)

    def _run(self, op: str, name: str, nbytes: int, call: Callable[[], T], offset: int = 0) -> T:
        self._meet(op, name)
        return call()

    def _meet(self, op: str, name: str) -> set[str]:
        """Count the call; raise or sleep if that is due; return the kinds left to the caller."""
        due: list[Fault] = []
        with self._count_lock:
            for index, fault in enumerate(self._faults):
                if fault.op == op and fnmatchcase(name, fault.name_pattern):
                    self._num_calls[index] += 1
                    if not fault.nth or 0 <= self._num_calls[index] - fault.nth < fault.times:
                        due.append(fault)
        for fault in due:
            if fault.kind == "slow":
                time.sleep(fault.delay_s)
            elif fault.kind in ("eio", "enospc", "error"):
                code = {"eio": errno.EIO, "enospc": errno.ENOSPC}.get(fault.kind, fault.number)
                raise StorageError(code, f"{op} failed: {os.strerror(code)} (injected)", name)
        return {fault.kind for fault in due}


class MemoryCommitLog:
    """`CommitLog` without files: the last two records, encoded."""

    def __init__(self) -> None:
        self._records: list[bytes] = []

    def write(self, record: CommitRecord) -> None:
        """See `CommitLog.write`."""
        self._records = [*self._records[-1:], record.to_bytes()]

    def latest(self) -> CommitRecord | None:
        """See `CommitLog.latest`."""
        records = [CommitRecord.from_bytes(data) for data in self._records]
        return max(records, key=lambda record: record.sequence, default=None)


def _short(verb: str, name: str, offset: int, wanted: int, got: int) -> StorageError:
    return StorageError(
        errno.EIO,
        f"short {verb} at offset {offset}: wanted {wanted} bytes, got {got} (injected)",
        name,
    )
