"""The files of a run as somebody reads them who changes nothing, on a read-only drive too."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from mt_lightning.errors import ConfigError, CorruptPageError, StorageError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.header import HEADER_BYTES, check_header


class Payload:
    """The bytes behind the header of one open page file.

    Attributes:
        path: Where it lies.
        nbytes: Bytes of payload.
    """

    def __init__(self, fd: int, path: Path, nbytes: int) -> None:
        self._fd = fd
        self.path = path
        self.nbytes = nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a range of the payload, as it is.

        Raises:
            StorageError: It cannot be read, or the file ends before.
        """
        data = _pread(self._fd, self.path, HEADER_BYTES + offset, nbytes)
        if len(data) != nbytes:
            raise CorruptPageError(
                None,
                f"ends at byte {offset + len(data)} of its payload; {offset + nbytes} are needed",
                str(self.path),
            )
        return data

    def read_block(self, offset: int, nbytes: int, expected: int) -> bytes:
        """Return a block whose checksum is known.

        Raises:
            StorageError: It cannot be read.
            CorruptPageError: The checksum differs, twice.
        """
        data = self.read(offset, nbytes)
        if xxhash.xxh3_64_intdigest(data) != expected:
            self.forget(offset, nbytes)
            data = self.read(offset, nbytes)
        found = xxhash.xxh3_64_intdigest(data)
        if found != expected:
            raise CorruptPageError(
                errno.EBADMSG,
                f"{nbytes} bytes at offset {offset} of the payload (byte {HEADER_BYTES + offset} "
                f"of the file) have checksum {found:016x} instead of {expected:016x}",
                str(self.path),
            )
        return data

    def forget(self, offset: int = 0, nbytes: int = 0) -> None:
        """Drop what the page cache has of a range, so that the drive is asked; 0 is to the end."""
        os.posix_fadvise(self._fd, HEADER_BYTES + offset, nbytes, os.POSIX_FADV_DONTNEED)


class RunFiles:
    """Page files and small files of one run.

    Args:
        directories: Its directories, in any order.

    Raises:
        ConfigError: One is no directory, or a page file lies in two of them.
        StorageError: One cannot be read.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]]) -> None:
        self.directories = [Path(directory) for directory in directories]
        self.pages: dict[str, Path] = {}
        for directory in self.directories:
            if not directory.is_dir():
                raise ConfigError(f"{directory} is not a directory.")
            for file in list_directory(directory / "pages"):
                if file.name in self.pages:
                    other = self.pages[file.name].parents[1]
                    raise ConfigError(
                        f"the page file {file.name} lies in both {other} and {directory}: these "
                        "are not the directories of one run."
                    )
                self.pages[file.name] = file

    def small(self, name: str) -> bytes | None:
        """Return a small file, None where none of the directories has it.

        Raises:
            StorageError: It cannot be read.
        """
        for directory in self.directories:
            try:
                return (directory / name).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StorageError(
                    error.errno, f"cannot read: {error.strerror}", str(directory / name)
                ) from error
        return None

    @contextmanager
    def open(self, name: str, nbytes: int) -> Iterator[Payload]:
        """Open a page file and check that it is what its name says.

        Args:
            name: Its name.
            nbytes: The bytes of payload that it should have.

        Raises:
            StorageError: It cannot be read.
            CorruptPageError: It is not there, too short, or another file.
        """
        path = self.pages.get(name)
        if path is None:
            raise CorruptPageError(
                None,
                "the last commit names this file, and none of the directories has it; give all "
                "directories of the run",
                str(self.directories[0] / "pages" / name),
            )
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(error.errno, f"cannot open: {error.strerror}", str(path)) from error
        try:
            held_bytes = os.fstat(fd).st_size - HEADER_BYTES
            if held_bytes < 0:
                raise CorruptPageError(None, "the file is shorter than its header", str(path))
            stated_bytes = check_header(_pread(fd, path, 0, HEADER_BYTES), name, {}, str(path))
            if held_bytes != nbytes or stated_bytes != nbytes:
                raise CorruptPageError(
                    None,
                    f"holds {held_bytes} bytes of payload, its header says {stated_bytes}, and "
                    f"the commit needs {nbytes}",
                    str(path),
                )
            payload = Payload(fd, path, nbytes)
            payload.forget()
            yield payload
            payload.forget()
        finally:
            os.close(fd)


def blocks(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the blocks that a piece is checksummed in."""
    for start in range(0, nbytes, BLOCK_BYTES):
        yield offset + start, min(BLOCK_BYTES, nbytes - start)


def list_directory(directory: Path) -> list[Path]:
    """Return the files of a directory by name, none where there is no such directory.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot read the directory: {error.strerror}", str(directory)
        ) from error


def _pread(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    parts, done = [], 0
    while done < nbytes:
        try:
            part = os.pread(fd, nbytes - done, offset + done)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"read of {nbytes} bytes at byte {offset} failed: {error.strerror}",
                str(path),
            ) from error
        if not part:
            break
        parts.append(part)
        done += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
