"""One page file: a header and a payload, moved around the page cache where that is possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.address import map_anonymous
from mt_lightning.tiers.advice import advice
from mt_lightning.tiers.descriptors import OpenFile
from mt_lightning.tiers.filesystem import O_DIRECT, free_bytes, preallocate, sync_directory
from mt_lightning.tiers.header import HEADER_BYTES, check_header, encode_header

logger = logging.getLogger(__name__)

NEW_SUFFIX = ".new"
"""Ends the passing name of a file that is not whole yet."""

_COPY_BYTES = 4 << 20
_NO_WRITING = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def storage_error(error: OSError, what: str, path: str) -> StorageError:
    """Return the kit's error for an error of the system, with what to do about it."""
    return StorageError(error.errno, f"{what}: {error.strerror}{advice(error.errno)}", path)


def write_all(fd: int, data: bytes | memoryview, offset: int = 0) -> None:
    """Write bytes, however many calls that takes.

    Raises:
        OSError: a write failed, or wrote nothing.
    """
    rest = memoryview(data)
    while rest.nbytes:
        moved = os.pwrite(fd, rest, offset)
        if not moved:
            raise OSError(errno.EIO, "nothing was written")
        rest, offset = rest[moved:], offset + moved


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file: durable on return, and old or new as a whole after a crash.

    Raises:
        OSError: it failed; the old file is still there.
    """
    fresh = path.with_name(path.name + NEW_SUFFIX)
    try:
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(fresh, path)
    except OSError:
        _forget(fresh)
        raise
    sync_directory(path.parent)


def _free(directory: Path) -> str:
    """Say what is free, where the drive still tells."""
    try:
        return f" ({free_bytes(directory)} free)"
    except OSError:
        return ""


def _forget(fresh: Path) -> None:
    """Remove a file that did not become whole, if its drive still lets us."""
    with contextlib.suppress(OSError):
        os.unlink(fresh)


class PageFiles:
    """Makes, opens, reads and writes page files; the name of a file is what its header says.

    Attributes:
        direct: whether I/O goes around the page cache; False once a file system refused.
    """

    def __init__(self, header_of: Callable[[str], Mapping[str, object]]) -> None:
        self.direct = bool(O_DIRECT)
        self._header_of = header_of
        self._checked: dict[str, tuple[int, int, int]] = {}
        """Device, inode and length of the file at each path whose header was found right."""

    def make(self, path: Path, nbytes: int, *, keep: bool = False) -> None:
        """Make a file under a passing name and rename it when it is whole.

        Args:
            path: Its name; a file that has it is replaced.
            nbytes: Its payload.
            keep: Whether the payload begins as a copy of that of the file which is replaced.

        Raises:
            StorageError: no space left, or the file system failed; nothing is left behind.
        """
        fresh = path.with_name(path.name + NEW_SUFFIX)
        try:
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                preallocate(fd, HEADER_BYTES + nbytes)
                header = encode_header(path.name, nbytes, self._header_of(path.name))
                write_all(fd, header)
                if keep:
                    _copy_payload(path, fd)
            finally:
                os.close(fd)
            os.replace(fresh, path)
        except OSError as error:
            _forget(fresh)
            what = f"cannot reserve {nbytes} bytes{_free(path.parent)}"
            raise storage_error(error, what, str(path)) from error

    def open(self, path: Path) -> OpenFile:
        """Open a file and check that it is what its name says.

        Raises:
            StorageError: it cannot be opened.
            CorruptPageError: its header or length is wrong.
        """
        refusal: OSError | None = None
        try:
            try:
                fd = self._open(path, os.O_RDWR)
            except OSError as error:
                if error.errno not in _NO_WRITING:
                    raise
                # What the last commit holds can still be read.
                fd, refusal = self._open(path, os.O_RDONLY), error
        except OSError as error:
            raise storage_error(error, "cannot open", str(path)) from error
        try:
            file_bytes = os.fstat(fd).st_size
            file = OpenFile(fd, str(path), file_bytes - HEADER_BYTES, refusal)
            self._check(file, path.name, file_bytes)
        except BaseException:
            os.close(fd)
            raise
        return file

    def _open(self, path: Path, flags: int) -> int:
        flags |= os.O_CLOEXEC
        try:
            return os.open(path, flags | (O_DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self._announce_buffered(str(path))
            return os.open(path, flags)

    def read(self, file: OpenFile, offset: int, data: memoryview) -> None:
        """Fill `data` from the payload, whole or StorageError."""
        self._transfer(file, os.preadv, "read", offset, data)

    def write(self, file: OpenFile, offset: int, data: memoryview) -> None:
        """Write `data` to the payload, whole or StorageError."""
        self._transfer(file, os.pwritev, "write", offset, data)

    def sync(self, file: OpenFile) -> None:
        """Make the file's bytes durable, or StorageError.

        Raises:
            StorageError: the sync failed, or the file is no longer what its path names: a commit
                must not count on it.
        """
        try:
            os.fdatasync(file.fd)
            if not self.direct:  # only now are the written pages clean, so that they can go
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            here, there = os.fstat(file.fd), os.stat(file.path)
        except OSError as error:
            failed = storage_error(error, "sync failed", file.path)
            failed.final = True
            raise failed from error
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            raise StorageError(
                errno.ENOENT,
                "another file took the place of this page file while it was in use; "
                "let nothing else write to offload_dir",
                file.path,
            )
        self._check_length(file)

    def _check_length(self, file: OpenFile, said: str = "") -> None:
        found_bytes = os.fstat(file.fd).st_size - HEADER_BYTES
        if found_bytes != file.payload_bytes:
            raise CorruptPageError(
                None,
                f"{said}payload bytes differ (expected {file.payload_bytes}, found {found_bytes}): "
                "the file was cut or lengthened while it was in use; let nothing else write to "
                "offload_dir",
                file.path,
            )

    def _check(self, file: OpenFile, name: str, file_bytes: int) -> None:
        if file_bytes < HEADER_BYTES:
            raise CorruptPageError(
                None, f"length differs: {file_bytes} bytes are no header", file.path
            )
        facts = os.fstat(file.fd)
        identity = (facts.st_dev, facts.st_ino, file_bytes)
        if self._checked.get(file.path) == identity:
            return  # the header of a file is written once, before it has its name
        header = memoryview(map_anonymous(HEADER_BYTES)).cast("B")
        self.read(file, -HEADER_BYTES, header)
        stated_bytes = check_header(bytes(header), name, self._header_of(name), file.path)
        if stated_bytes != file.payload_bytes:
            raise CorruptPageError(
                None,
                f"payload bytes differ (header {stated_bytes}, file {file.payload_bytes}); "
                "give another offload_dir, or on_existing='overwrite' to start anew",
                file.path,
            )
        self._checked[file.path] = identity

    def _transfer(
        self,
        file: OpenFile,
        call: Callable[[int, list[memoryview], int], int],
        verb: str,
        offset: int,
        data: memoryview,
    ) -> None:
        """Call `preadv` or `pwritev` until all is moved. Python itself repeats a call on EINTR."""
        start = HEADER_BYTES + offset
        done = 0
        if verb == "write":
            self._check_length(file)  # a write would fill the gap, and nothing would show it
        while done < data.nbytes:
            try:
                moved = call(file.fd, [data[done:]], start + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._leave_direct(file):
                    continue
                what = f"{verb} of {data.nbytes} bytes at offset {offset} failed after {done}"
                raise storage_error(error, what, file.path) from error
            if done + moved < data.nbytes:
                moved -= moved % ALIGN_BYTES  # direct I/O goes on from an aligned place only
            if moved == 0:
                short = f"short {verb} at offset {offset}: wanted {data.nbytes} bytes, got {done}"
                self._check_length(file, f"{short}; ")
                raise StorageError(errno.EIO, short, file.path)
            done += moved
        if not self.direct:
            os.posix_fadvise(file.fd, start, data.nbytes, os.POSIX_FADV_DONTNEED)

    def _leave_direct(self, file: OpenFile) -> bool:
        """Turn a file to buffered I/O; return False if it already was."""
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        if not flags & O_DIRECT:
            return False
        fcntl.fcntl(file.fd, fcntl.F_SETFL, flags & ~O_DIRECT)
        self._announce_buffered(file.path)
        return True

    def _announce_buffered(self, path: str) -> None:
        if self.direct:
            self.direct = False
            logger.warning(
                "The file system of %s refuses direct I/O (O_DIRECT); pages go through the page "
                "cache, which is slower. Give an offload_dir on a local drive to avoid this.",
                path,
            )


def _copy_payload(path: Path, fd: int) -> None:
    old = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset = HEADER_BYTES
        while data := os.pread(old, _COPY_BYTES, offset):
            write_all(fd, data, offset)
            offset += len(data)
    finally:
        os.close(old)
