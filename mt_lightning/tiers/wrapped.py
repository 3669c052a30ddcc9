"""A store in front of another one; each kind of it does one thing about every operation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from mt_lightning.tiers.mapping import PrivateMapping
from mt_lightning.tiers.store import Store

T = TypeVar("T")


class WrappedStore(Store):
    """A store that lets `_run` pass on every operation that may reach the drive."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @abstractmethod
    def _run(self, op: str, name: str, nbytes: int, call: Callable[[], T], offset: int = 0) -> T:
        """Run an operation of the inner store.

        Args:
            op: Which method.
            name: Of which payload or record.
            nbytes: How many bytes it reads, writes or reserves.
            call: Runs it.
            offset: Where in the payload.
        """

    @property
    def bytes_read(self) -> int:
        """See `Store.bytes_read`."""
        return self.inner.bytes_read

    @property
    def bytes_written(self) -> int:
        """See `Store.bytes_written`."""
        return self.inner.bytes_written

    def create(self, name: str, nbytes: int) -> None:
        """See `Store.create`."""
        self._run("create", name, nbytes, partial(self.inner.create, name, nbytes))

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return self.inner.exists(name)

    def names(self) -> list[str]:
        """See `Store.names`."""
        return self.inner.names()

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return self._run("size", name, 0, partial(self.inner.size, name))

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read`."""
        call = partial(self.inner.read, name, offset, buffer)
        self._run("read", name, buffer.nbytes, call, offset)

    def write(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.write`."""
        call = partial(self.inner.write, name, offset, buffer)
        self._run("write", name, buffer.nbytes, call, offset)

    def sync(self, name: str) -> None:
        """See `Store.sync`."""
        self._run("sync", name, 0, partial(self.inner.sync, name))

    def replace(self, name: str, *, keep: bool = False) -> None:
        """See `Store.replace`."""
        self._run("replace", name, 0, partial(self.inner.replace, name, keep=keep))

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self._run("delete", name, 0, partial(self.inner.delete, name))

    def map_private(self, name: str, offset: int, nbytes: int) -> PrivateMapping:
        """See `Store.map_private`."""
        call = partial(self.inner.map_private, name, offset, nbytes)
        return self._run("map_private", name, nbytes, call, offset)

    def drive_of(self, name: str) -> int:
        """See `Store.drive_of`."""
        return self.inner.drive_of(name)

    def is_mapped(self, name: str) -> bool:
        """See `Store.is_mapped`."""
        return self.inner.is_mapped(name)

    def read_small(self, name: str) -> bytes | None:
        """See `Store.read_small`."""
        return self._run("read_small", name, 0, partial(self.inner.read_small, name))

    def write_small(self, name: str, data: bytes) -> None:
        """See `Store.write_small`."""
        self._run("write_small", name, len(data), partial(self.inner.write_small, name, data))

    def trim(self) -> int:
        """See `Store.trim`."""
        return self.inner.trim()

    def close(self) -> None:
        """See `Store.close`."""
        self.inner.close()
