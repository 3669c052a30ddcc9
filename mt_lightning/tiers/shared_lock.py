"""Readers of a directory: none while a run has it, and no run while one of them reads."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.tiers import lock

_THIS_PROCESS = "a run of this process"


def holder(path: Path) -> str | None:
    """Say who has a directory for itself now, None when nobody does.

    Raises:
        StorageError: The lock file cannot be read.
    """
    if _is_own(path):
        return _THIS_PROCESS
    fd = _open(path)
    if fd is None:
        return None
    try:
        return None if _share(fd, path) else _named(fd)
    finally:
        os.close(fd)


@contextmanager
def shared(paths: Sequence[Path]) -> Iterator[None]:
    """Read directories that no run may change meanwhile. Changes nothing in them.

    Raises:
        ConfigError: A run uses one of them.
        StorageError: A lock file cannot be read.
    """
    held: list[int] = []
    try:
        for path in paths:
            who = _THIS_PROCESS if _is_own(path) else None
            fd = _open(path) if who is None else None
            if fd is not None:
                held.append(fd)
                who = None if _share(fd, path) else _named(fd)
            if who is not None:
                raise ConfigError(
                    f"the directory {str(path)!r} is in use by {who}; wait for that run to end, or "
                    "take a checkpoint of it"
                )
        yield
    finally:
        for fd in held:
            os.close(fd)


def _is_own(path: Path) -> bool:
    # Asked before the lock file is opened: closing it would end this process's own lock.
    return lock._held.get(os.path.realpath(path)) == os.getpid()


def _open(path: Path) -> int | None:
    file = path / "lock"
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # never used here, or copied without it
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot read the lock file: {error.strerror}", str(file)
        ) from error


def _share(fd: int, path: Path) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EROFS):
            return True  # this file system has no locks
        raise StorageError(
            error.errno, f"cannot lock the directory: {error.strerror}", str(path)
        ) from error
    return True


def _named(fd: int) -> str:
    words = os.pread(fd, 300, 0).decode(errors="replace").split()
    pid, host = words if len(words) == 2 else ("unknown", "unknown")
    return f"pid {pid} on host {host}"
