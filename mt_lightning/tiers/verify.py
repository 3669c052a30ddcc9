"""Read the files of a linked checkpoint against the checksums in its manifest."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import xxhash

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.header import HEADER_BYTES, check_header
from mt_lightning.tiers.manifest import Manifest
from mt_lightning.tiers.run_files import Payload

_NUM_THREADS = 4


def verify(manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Read every block of a checkpoint once.

    Args:
        manifest: As `read_manifest` returns it.
        names: The page files to read; None: all, and the file with everything else.

    Raises:
        StorageError: A file is missing or cannot be read.
        CorruptPageError: A file is not what it was; the message names it and the offset.
    """
    if names is None:
        verify_rest(manifest)
    todo = list(manifest.files if names is None else names)
    with ThreadPoolExecutor(_NUM_THREADS, "megatrain-verify") as pool:
        # All of them end before the first error is raised.
        for done in [pool.submit(partial(verify_file, manifest, name)) for name in todo]:
            done.result()


def verify_file(manifest: Manifest, name: str) -> None:
    """Read one page file; see `verify`."""
    try:
        with page_file(manifest, name) as payload:
            for offset, nbytes, expected in manifest.files[name].blocks():
                payload.read_block(offset, nbytes, expected)
    except CorruptPageError as error:
        raise CorruptPageError(
            error.errno,
            f"{error.strerror}: this checkpoint is damaged; use another one, and check the drive",
            error.filename,
        ) from error


@contextmanager
def page_file(manifest: Manifest, name: str, *, fresh: bool = False) -> Iterator[Payload]:
    """Open a page file of a checkpoint; see `open_page_file`.

    Args:
        manifest: As `read_manifest` returns it.
        name: The file.
        fresh: Whether the drive is asked even for what is in the page cache.
    """
    fd = open_page_file(manifest, name)
    try:
        payload = Payload(fd, manifest.path_of(name), manifest.files[name].nbytes)
        if fresh:
            payload.forget()
        yield payload
    finally:
        os.close(fd)


def verify_rest(manifest: Manifest) -> None:
    """Read the file with everything else; see `verify`."""
    path, (_, nbytes, expected) = manifest.rest_path, manifest.rest
    fd = open_regular(path)
    try:
        _check_length(fd, nbytes, path)
        if sum_of_file(fd, path) != expected:
            raise CorruptPageError(
                errno.EBADMSG, f"checksum of {nbytes} bytes at offset 0 is another", str(path)
            )
    finally:
        os.close(fd)


def _check_length(fd: int, expected: int, path: Path) -> None:
    found = os.fstat(fd).st_size
    if found != expected:
        raise CorruptPageError(
            errno.EBADMSG, f"the file has {found} bytes instead of {expected}", str(path)
        )


def sum_of_file(fd: int, path: Path) -> int:
    """Return the xxh3_64 of a whole file."""
    digest, at = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(BLOCK_BYTES))
    left = os.fstat(fd).st_size
    while left:
        block = buffer[: min(left, BLOCK_BYTES)]
        fill(fd, at, block, path)
        digest.update(block)
        at, left = at + block.nbytes, left - block.nbytes
    return digest.intdigest()


def open_page_file(manifest: Manifest, name: str) -> int:
    """Open a page file of a checkpoint and check what it is; return the descriptor.

    Raises:
        StorageError: It is missing or cannot be opened.
        CorruptPageError: It is no page file of this name and length.
    """
    path, expected = manifest.path_of(name), manifest.files[name].nbytes + HEADER_BYTES
    fd = open_regular(path)
    try:
        _check_length(fd, expected, path)
        stated = check_header(os.pread(fd, HEADER_BYTES, 0), name, {}, str(path))
        if stated != manifest.files[name].nbytes:
            raise CorruptPageError(errno.EBADMSG, f"the header states {stated} bytes", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_regular(path: Path) -> int:
    """Open a file for reading that is neither a link nor a pipe.

    Raises:
        StorageError: There is no such file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise StorageError(
            error.errno, f"a file of this checkpoint cannot be opened: {error.strerror}", str(path)
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptPageError(errno.EBADMSG, "a file of this checkpoint is no file", str(path))
    return fd


def read_file(path: Path) -> bytes:
    """Return a small file of a checkpoint.

    Raises:
        StorageError: It is missing or cannot be read.
    """
    fd = open_regular(path)
    try:
        data = bytearray(os.fstat(fd).st_size)
        fill(fd, 0, memoryview(data), path)
        return bytes(data)
    finally:
        os.close(fd)


def fill(fd: int, offset: int, block: memoryview, path: str | os.PathLike[str]) -> None:
    """Fill a buffer from a file, whole or StorageError."""
    done = 0
    while done < block.nbytes:
        try:
            moved = os.preadv(fd, [block[done:]], offset + done)
        except OSError as error:
            what = f"read of {block.nbytes} bytes at offset {offset} failed: {error.strerror}"
            raise StorageError(error.errno, what, str(path)) from error
        if not moved:
            raise CorruptPageError(
                errno.EBADMSG, f"the file ends at offset {offset + done}", str(path)
            )
        done += moved
