"""Named byte ranges on a slower tier: the `Store` interface and the files behind it."""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mt_lightning.errors import ConfigError, CorruptPageError, StorageError
from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.checks import check_name, check_piece, check_size
from mt_lightning.tiers.descriptors import DescriptorCache, OpenFile
from mt_lightning.tiers.direct import DirectReads
from mt_lightning.tiers.filesystem import free_bytes, sync_directory, sync_path
from mt_lightning.tiers.header import HEADER_BYTES
from mt_lightning.tiers.mapping import LiveViews, PrivateMapping
from mt_lightning.tiers.origins import forget, remember
from mt_lightning.tiers.pagefile import NEW_SUFFIX, PageFiles, storage_error, write_whole
from mt_lightning.tiers.placing import place_for
from mt_lightning.tiers.unsynced import Unsynced

_MAX_OPEN_FILES = 128


class Store(ABC):
    """Named payloads of fixed size. Reads and writes block, and are whole or raise.

    Offsets and lengths are relative to the payload and multiples of `ALIGN_BYTES`; buffers start on
    such a boundary. All methods may be called from any thread, but no two at once that change or
    replace the same bytes.
    """

    @property
    @abstractmethod
    def bytes_read(self) -> int:
        """Payload bytes read so far."""

    @property
    @abstractmethod
    def bytes_written(self) -> int:
        """Payload bytes written so far."""

    @abstractmethod
    def create(self, name: str, nbytes: int) -> None:
        """Make a payload with its space reserved; do nothing if it exists with this size.

        Raises:
            StorageError: no space left, or the file system failed.
            CorruptPageError: it exists and is not what it should be.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Tell whether a payload exists, whole."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all payloads."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the payload bytes of a name."""

    @abstractmethod
    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from `offset` on.

        Raises:
            StorageError: the read failed or was short; the buffer's contents are undefined.
        """

    @abstractmethod
    def write(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write a buffer at `offset`.

        Raises:
            StorageError: the write failed; any part of it may have happened.
        """

    @abstractmethod
    def sync(self, name: str) -> None:
        """Make all writes to a name that have returned, and the name itself, durable."""

    @abstractmethod
    def replace(self, name: str, *, keep: bool = False) -> None:
        """Give a name a fresh payload of the same size.

        The old one stays as it is for mappings and hard links of it.

        Args:
            name: The name.
            keep: Whether the new payload begins as a copy of the old one, else undefined.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a name; mappings and hard links of it stay."""

    @abstractmethod
    def map_private(self, name: str, offset: int, nbytes: int) -> PrivateMapping:
        """Map a range copy-on-write."""

    def is_mapped(self, name: str) -> bool:
        """Tell whether a mapping's tensor or a hard link shows it: then replace, do not write."""
        del name
        return False

    def prepare_write(self, name: str, nbytes: int, *, keep: bool = False) -> None:
        """Make sure that `name` exists and that writing to it changes nobody's mapping or link.

        Args:
            name: The payload.
            nbytes: Its bytes.
            keep: Whether what it holds will be read again before it is written.
        """
        if self.is_mapped(name):
            self.replace(name, keep=keep)
        self.create(name, nbytes)

    def drive_of(self, name: str) -> int:
        """Return which drive a payload lies on: a number that means nothing else."""
        del name
        return 0

    @abstractmethod
    def read_small(self, name: str) -> bytes | None:
        """Return a small record, or None if it was never written."""

    @abstractmethod
    def write_small(self, name: str, data: bytes) -> None:
        """Write a small record: durable on return, and old or new as a whole after a crash."""

    def trim(self) -> int:
        """Close files that are not in use, because descriptors are short; return how many."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Let go of what the store holds open. Payloads stay."""


class FileStore(Store):
    """Payloads as files under `<directory>/pages/`, read and written around the page cache.

    A file lies whole in one directory, chosen when it is created. Small records lie in the first
    directory.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        header_of: Callable[[str], Mapping[str, object]] | None = None,
        direct: DirectReads | None = None,
    ) -> None:
        """Open or make a store.

        Args:
            directories: where files go; several are filled in proportion to their space.
            header_of: gives, for a name, what its header states and must state when it is opened
                again (JSON values), for example a fingerprint of the page layout.
            direct: reads payloads where it can, None: the files are read by the system's own calls.

        Raises:
            ConfigError: a file lies in two of the directories.
            StorageError: a directory cannot be made or read.
        """
        assert directories, "a store needs a directory"
        self.directories = [Path(directory) for directory in directories]
        self._lock = threading.RLock()
        self._page_files = PageFiles(header_of or (lambda name: {}))
        self._direct = direct
        self._files = DescriptorCache(self._open, _MAX_OPEN_FILES)
        self._places: dict[str, Path] = {}
        self._assigned_bytes = dict.fromkeys(self.directories, 0)
        self._drives: dict[Path, int] = {}
        """The number of the device of each directory."""
        self._unsynced = Unsynced()
        self._views: dict[str, list[LiveViews]] = {}
        self._bytes_read = 0
        self._bytes_written = 0
        for directory in self.directories:
            self._scan(directory)

    @property
    def bytes_read(self) -> int:
        """Payload bytes read so far."""
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Payload bytes written so far."""
        return self._bytes_written

    @property
    def direct(self) -> bool:
        """Whether I/O goes around the page cache; turns False when a file system refuses."""
        return self._page_files.direct

    def create(self, name: str, nbytes: int) -> None:
        """See `Store.create`."""
        check_name(name)
        check_size(name, nbytes)
        with self._lock:
            if name in self._places:
                if self.size(name) != nbytes:
                    raise CorruptPageError(
                        None,
                        f"payload bytes differ (expected {nbytes}, found {self.size(name)}); "
                        "give another offload_dir, or on_existing='overwrite' to start anew",
                        str(self.path_of(name)),
                    )
                return
            try:
                directory = self._choose(name, nbytes)
            except OSError as error:
                raise storage_error(error, "cannot use offload_dir", name) from error
            self._page_files.make(directory / "pages" / name, nbytes)
            self._unsynced.named(name, str(directory / "pages"))
            self._places[name] = directory
            self._assigned_bytes[directory] += HEADER_BYTES + nbytes

    def exists(self, name: str) -> bool:
        """See `Store.exists`."""
        return name in self._places

    def names(self) -> list[str]:
        """See `Store.names`."""
        return sorted(self._places)

    def path_of(self, name: str) -> Path:
        """Return where the file of a name lies.

        Raises:
            StorageError: there is no such file.
        """
        try:
            return self._places[name] / "pages" / name
        except KeyError:
            raise StorageError(errno.ENOENT, "no such page file in any offload_dir", name) from None

    def size(self, name: str) -> int:
        """See `Store.size`."""
        with self._files.lease(name) as file:
            return file.payload_bytes

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read`."""
        with self._files.lease(name) as file:
            data = check_piece(name, file.payload_bytes, offset, buffer)
            if self._direct is None or not self._direct.read(file, offset, data):
                self._page_files.read(file, offset, data)
        with self._lock:
            self._bytes_read += data.nbytes

    def write(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.write`."""
        with self._files.lease(name) as file:
            data = check_piece(name, file.payload_bytes, offset, buffer)
            if file.refusal is not None:
                self._files.drop(name)  # next time it may be allowed
                raise storage_error(file.refusal, f"cannot write at offset {offset}", file.path)
            try:
                self._page_files.write(file, offset, data)
            finally:
                self._unsynced.written(name)
        with self._lock:
            self._bytes_written += data.nbytes

    def sync(self, name: str) -> None:
        """See `Store.sync`."""
        with self._files.lease(name) as file:
            with self._unsynced.syncing(name):
                self._page_files.sync(file)
            try:
                self._unsynced.sync_name(name, sync_directory)
            except OSError as error:
                raise storage_error(error, "sync of a directory failed", file.path) from error

    def unsynced(self, names: Iterable[str]) -> list[str]:
        """Return which names have to be synced before anything may count on them."""
        return self._unsynced.among(names)

    def replace(self, name: str, *, keep: bool = False) -> None:
        """See `Store.replace`."""
        path = self.path_of(name)
        with self._lock:
            self._page_files.make(path, self.size(name), keep=keep)
            self._unsynced.named(name, str(path.parent))
            self._files.drop(name)
            forget(self._views.pop(name, []))

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with self._lock:
            path = self.path_of(name)
            try:
                nbytes = path.stat().st_size
                path.unlink()
            except OSError as error:
                raise storage_error(error, "cannot delete", str(path)) from error
            self._assigned_bytes[self._places.pop(name)] -= nbytes
            self._files.drop(name)
            forget(self._views.pop(name, []))
            self._unsynced.forget(name)

    def map_private(self, name: str, offset: int, nbytes: int) -> PrivateMapping:
        """See `Store.map_private`."""
        with self._lock, self._files.lease(name) as file:
            assert (offset | nbytes) % ALIGN_BYTES == 0, (name, offset, nbytes)
            assert 0 <= offset < offset + nbytes <= file.payload_bytes, (name, offset, nbytes)
            try:
                mapping = PrivateMapping.of_file(file.fd, HEADER_BYTES + offset, nbytes)
            except OSError as error:
                raise storage_error(error, f"cannot map {nbytes} bytes", file.path) from error
            live = [views for views in self._views.get(name, []) if views.any()]
            self._views[name] = [*live, mapping.views]
            remember(mapping, self, name, offset)
            return mapping

    def drive_of(self, name: str) -> int:
        """See `Store.drive_of`. Directories on one device are one drive."""
        place = self._places.get(name)
        return 0 if place is None else self._drives[place]

    def is_mapped(self, name: str) -> bool:
        """See `Store.is_mapped`."""
        if name not in self._places:
            return False
        with self._lock, self._files.lease(name) as file:
            mapped = any(views.any() for views in self._views.get(name, ()))
            return mapped or os.fstat(file.fd).st_nlink > 1

    def read_small(self, name: str) -> bytes | None:
        """See `Store.read_small`."""
        check_name(name)
        path = self.directories[0] / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "cannot read", str(path)) from error

    def write_small(self, name: str, data: bytes) -> None:
        """See `Store.write_small`."""
        check_name(name)
        path = self.directories[0] / name
        try:
            write_whole(path, data)
        except OSError as error:
            raise storage_error(error, f"cannot write {len(data)} bytes", str(path)) from error

    def trim(self) -> int:
        """See `Store.trim`."""
        return self._files.trim()

    def close(self) -> None:
        """See `Store.close`."""
        self._files.close()

    def _scan(self, directory: Path) -> None:
        """Find the files of an earlier run."""
        pages = directory / "pages"
        try:
            pages.mkdir(parents=True, exist_ok=True)
            # Whoever made them, or files in them, may have been killed before they were durable.
            sync_path(pages)
            self._drives[directory] = os.stat(pages).st_dev
            entries = [entry for entry in os.scandir(pages) if not entry.name.endswith(NEW_SUFFIX)]
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        except OSError as error:
            raise storage_error(error, "cannot use offload_dir", str(pages)) from error
        for name, nbytes in sizes.items():
            if name in self._places:
                raise ConfigError(
                    f"the page file {name} lies in both {self._places[name]} and {directory}; "
                    "a file has one place; remove one of them from offload_dir"
                )
            self._places[name] = directory
            self._unsynced.written(name)  # by whom, and whether it was synced, is not known
            self._assigned_bytes[directory] += nbytes

    def _choose(self, name: str, nbytes: int) -> Path:
        """Return the directory of a new file."""
        free = {directory: free_bytes(directory) for directory in self.directories}
        nbytes += HEADER_BYTES
        return place_for(name, nbytes, self._places, self._assigned_bytes, free)

    def _open(self, name: str) -> OpenFile:
        return self._page_files.open(self.path_of(name))
