"""What of the page files a power cut could still take: bytes, and names in a directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Unsynced:
    """Which files were written, and which were named, since they were last made durable.

    Any thread may call it. A file that is written while it is synced counts as not durable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._naming = threading.Lock()
        self._written: set[str] = set()
        self._named: dict[str, tuple[str, object]] = {}
        """The directory of each new name, and a token of the moment it was given."""

    def written(self, name: str) -> None:
        """Take note that a write to a file has ended, whole or not."""
        with self._lock:
            self._written.add(name)

    def named(self, name: str, directory: str) -> None:
        """Take note that a name means a fresh file."""
        with self._lock:
            self._written.add(name)
            self._named[name] = (directory, object())

    def forget(self, name: str) -> None:
        """Take note that a name is gone."""
        with self._lock:
            self._written.discard(name)
            self._named.pop(name, None)

    def among(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that are not durable, with their bytes, by now."""
        with self._lock:
            return [name for name in names if name in self._written or name in self._named]

    @contextmanager
    def syncing(self, name: str) -> Iterator[None]:
        """Sync the bytes of a file in the body; if it raises, they are not durable."""
        with self._lock:
            self._written.discard(name)
        try:
            yield
        except BaseException:
            self.written(name)
            raise

    def sync_name(self, name: str, sync: Callable[[str], None]) -> None:
        """Make a name durable, and with it all others that its directory has by now.

        Args:
            name: The name.
            sync: Makes the names in a directory durable; one call does for many names.
        """
        # Who asks for another name of the directory meanwhile waits: it may be in this sync.
        with self._naming:
            with self._lock:
                directory = self._named.get(name, (None,))[0]
                held = [item for item in self._named.items() if item[1][0] == directory]
            if directory is None:
                return
            sync(directory)
            with self._lock:
                for each, entry in held:
                    if self._named.get(each) is entry:
                        del self._named[each]
