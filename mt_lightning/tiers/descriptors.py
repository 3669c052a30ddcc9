"""A bounded set of open files, so that thousands of page files need few descriptors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol


class Closable(Protocol):
    """Something that is open."""

    def close(self) -> None:
        """Let go of it."""
        ...


@dataclass(eq=False)
class OpenFile:
    """An open page file."""

    fd: int
    path: str
    payload_bytes: int
    refusal: OSError | None = None
    """Why it is open for reading only; None where it may be written."""
    num_leases: int = 0
    """Operations that use the descriptor now; it is not closed before they end."""
    dropped: bool = False
    """The name no longer means this file: close it with the last lease."""
    other: Closable | None = None
    """What another library has open of the same file."""

    def close(self) -> None:
        """Close it; nobody uses it."""
        if self.other is not None:
            self.other.close()
        os.close(self.fd)


class DescriptorCache:
    """Open files by name, least recently used first; at most `limit` of them are idle."""

    def __init__(self, open_file: Callable[[str], OpenFile], limit: int) -> None:
        self._open_file = open_file
        self._limit = limit
        self._lock = threading.Lock()
        self._files: dict[str, OpenFile] = {}

    @contextmanager
    def lease(self, name: str) -> Iterator[OpenFile]:
        """Use the file of a name, opened if need be. Thread safe."""
        with self._lock:
            file = self._files.pop(name, None) or self._open_file(name)
            self._files[name] = file
            file.num_leases += 1
            self._evict()
        try:
            yield file
        finally:
            with self._lock:
                file.num_leases -= 1
                if file.dropped and not file.num_leases:
                    file.close()

    def drop(self, name: str) -> None:
        """Forget the file of a name: the next lease opens the name anew."""
        with self._lock:
            file = self._files.pop(name, None)
            if file is not None:
                self._retire(file)

    def trim(self) -> int:
        """Close the files that nobody uses now; return how many."""
        with self._lock:
            idle = [name for name, file in self._files.items() if not file.num_leases]
            for name in idle:
                self._files.pop(name).close()
            return len(idle)

    def close(self) -> None:
        """Forget all files."""
        with self._lock:
            for file in self._files.values():
                self._retire(file)
            self._files.clear()

    def __len__(self) -> int:
        return len(self._files)

    def _evict(self) -> None:
        while len(self._files) > self._limit:
            idle = next((name for name, file in self._files.items() if not file.num_leases), None)
            if idle is None:
                return
            self._files.pop(idle).close()

    @staticmethod
    def _retire(file: OpenFile) -> None:
        file.dropped = True
        if not file.num_leases:
            file.close()
