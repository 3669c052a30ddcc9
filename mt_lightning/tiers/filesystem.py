"""What the file system under a path is and can do."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.address import map_anonymous

O_DIRECT = getattr(os, "O_DIRECT", 0)
"""Zero where the platform has no direct I/O."""

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_OCTAL = re.compile(r"\\([0-7]{3})")


def existing_parent(path: str | os.PathLike[str]) -> Path:
    """Return the path itself or its nearest parent that exists, with links resolved."""
    resolved = Path(path).resolve()
    while not resolved.exists():
        resolved = resolved.parent
    return resolved


def kind(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system at a path ("ext4", "xfs", "tmpfs", "overlay", ...).

    The path need not exist yet. "unknown" where the platform has no /proc/self/mounts.
    """
    try:
        table = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return "unknown"
    where = existing_parent(path)
    best_length, best_kind = -1, "unknown"
    for line in table.splitlines():
        _, mount_point, found_kind, *_ = line.split(" ")
        mount = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), mount_point))
        # Of several mounts on one point the last one is visible.
        if where.is_relative_to(mount) and len(mount.parts) >= best_length:
            best_length, best_kind = len(mount.parts), found_kind
    return best_kind


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes that an unprivileged user may still write at a path."""
    stats = os.statvfs(existing_parent(path))
    return stats.f_bavail * stats.f_frsize


def files_bytes(directories: Iterable[str | os.PathLike[str]]) -> int:
    """Return the bytes that files below some directories take on disk; links count once."""
    taken: dict[tuple[int, int], int] = {}
    for directory in directories:
        for folder, _, names in os.walk(directory):
            for name in names:
                try:
                    found = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:  # it went meanwhile
                    continue
                taken[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(taken.values())


def is_memory(path: str | os.PathLike[str]) -> bool:
    """Tell whether files at a path live in RAM: using them as a disk tier saves nothing."""
    return kind(path) in _MEMORY_KINDS


def supports_direct_io(path: str | os.PathLike[str]) -> bool:
    """Try a direct write and read in an existing directory; nothing is left behind."""
    if not O_DIRECT:
        return False
    block = memoryview(map_anonymous(ALIGN_BYTES)).cast("B")
    with tempfile.NamedTemporaryFile(dir=existing_parent(path), prefix=".direct-") as file:
        try:
            fd = os.open(file.name, os.O_RDWR | O_DIRECT)
        except OSError:
            return False
        try:
            return (
                os.pwritev(fd, [block], 0) == ALIGN_BYTES
                and os.preadv(fd, [block], 0) == ALIGN_BYTES
            )
        except OSError:
            return False
        finally:
            os.close(fd)


def preallocate(fd: int, nbytes: int) -> None:
    """Make a file `nbytes` long with its space reserved, where the file system can reserve.

    Raises:
        OSError: no space left, or the file system failed.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable: creations, renames and links."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Make a directory durable with its parents, as far up as this drive and this user's rights go.

    Raises:
        OSError: the directory itself cannot be synced.
    """
    sync_directory(path)
    drive = os.stat(path).st_dev
    for parent in Path(path).absolute().parents:
        try:
            if os.stat(parent).st_dev != drive:
                return
            sync_directory(parent)
        except PermissionError:
            return  # made by somebody else, before us
