"""One process per directory: a POSIX record lock on a file in it."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import threading
from pathlib import Path

from mt_lightning.errors import ConfigError, StorageError

# POSIX locks belong to the process: a second lock of the same file by the same process succeeds,
# and closing *any* descriptor of the file drops the lock. So this set is asked before opening.
# It maps to the pid because a forked child inherits the set but not the locks.
_held: dict[str, int] = {}
# Re-entrant: the garbage collector may end a forgotten run anywhere, also between these lines.
_held_lock = threading.RLock()


def held_directories() -> list[Path]:
    """Return the directories that this process has locked."""
    with _held_lock:
        return [Path(key) for key, pid in list(_held.items()) if pid == os.getpid()]


class DirectoryLock:
    """Exclusive use of a directory by one process.

    Uses `lockf`: unlike `flock`, it is not inherited by forked DataLoader workers, which would keep
    a directory "in use" after its owner was killed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._key = os.path.realpath(path)
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock or fail at once.

        Raises:
            ConfigError: another process, or another strategy of this one, uses the directory.
            StorageError: the lock file cannot be made.
        """
        with _held_lock:
            if _held.get(self._key) == os.getpid():
                # Trainers are cycles: that of a notebook cell which is run again may still be here.
                gc.collect()
            if _held.get(self._key) == os.getpid():
                raise ConfigError(self._refusal(f"this process (pid {os.getpid()})"))
            file = self.path / "lock"
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise StorageError(
                    error.errno, f"cannot make the lock file: {error.strerror}", str(file)
                ) from error
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            except OSError as error:
                holder = os.pread(fd, 300, 0).decode(errors="replace").split()
                os.close(fd)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise StorageError(
                        error.errno, f"cannot lock the directory: {error.strerror}", str(file)
                    ) from error
                pid, host = holder if len(holder) == 2 else ("unknown", "unknown")
                raise ConfigError(self._refusal(f"pid {pid} on host {host}")) from None
            self._fd = fd
            _held[self._key] = os.getpid()

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        with _held_lock:
            if self._fd is not None:
                if _held.get(self._key) == os.getpid():
                    del _held[self._key]
                os.close(self._fd)
                self._fd = None

    def _refusal(self, holder: str) -> str:
        return (
            f"the directory {str(self.path)!r} is in use by {holder}; one run has it for itself; "
            "wait for that run to end, or give another offload_dir"
        )
