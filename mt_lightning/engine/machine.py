"""Open the tiers of one run: directories, lock, files, commit log, memory and device link."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mt_lightning.engine.options import OnExisting
from mt_lightning.errors import BudgetError, ConfigError
from mt_lightning.tiers.arena import Arena
from mt_lightning.tiers.commit import CommitLog
from mt_lightning.tiers.filesystem import free_bytes, is_memory, kind
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.link import HostLink, Link
from mt_lightning.tiers.lock import DirectoryLock
from mt_lightning.tiers.store import FileStore, Store

log = logging.getLogger(__name__)

GIB = 1 << 30
_RAM_SHARE = 0.8
_DISK_MARGIN_BYTES = 1 << 30
_RECORDS = ("commit.0", "commit.1")


@dataclass
class Machine:
    """The tiers of one run.

    Attributes:
        directories: Where pages lie.
        in_memory: Whether a directory is on a memory file system, whose bytes count as RAM.
        store: Page files.
        log: Commit records.
        io: I/O threads.
        arena: Frames in RAM.
        link: The way to the device.
        clock: Seconds, for timing only.
    """

    directories: list[str]
    in_memory: bool
    store: Store
    log: CommitLog
    io: IOQueue
    arena: Arena
    link: Link
    clock: Callable[[], float]
    locks: list[DirectoryLock]

    def close(self) -> None:
        """End threads, close files and give the directory back."""
        self.io.close()
        self.store.close()
        self.link.close()
        self.arena.close()
        for lock in self.locks:
            lock.release()


def open_machine(
    directories: Sequence[str],
    on_existing: OnExisting,
    *,
    link: Link | None = None,
    wrap_store: Callable[[Store], Store] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Machine:
    """Lock the directories and open everything in them.

    Raises:
        ConfigError: A directory cannot be used, is in use, or holds a committed run.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"strategy='megatrain' needs Linux (direct I/O, private mappings); this is "
            f"{sys.platform}. "
            "Run it on Linux, in WSL 2 or in a container, or use strategy='auto'."
        )
    paths = [Path(directory).expanduser() for directory in directories]
    if len({os.path.realpath(path) for path in paths}) != len(paths):
        raise ConfigError(f"offload_dir={list(directories)}: a directory is named twice.")
    fresh = [path for path in paths if not path.exists()]
    locks: list[DirectoryLock] = []
    try:
        for path in paths:
            _check_writable(path)
            lock = DirectoryLock(path)
            lock.acquire()
            locks.append(lock)
        _check_existing(paths, on_existing)
        for path in paths:
            _remove_run(path)
        in_memory = any(is_memory(path) for path in paths)
        if in_memory:
            log.warning(
                "offload_dir is on a memory file system (%s): its bytes are charged to max_ram_gb. "
                "Use a directory on a drive.",
                ", ".join(kind(path) for path in paths),
            )
        store: Store = FileStore(paths)
        if wrap_store is not None:
            store = wrap_store(store)
    except BaseException:
        for lock in locks:
            lock.release()
        for path in fresh:
            shutil.rmtree(path, ignore_errors=True)
        raise
    return Machine(
        [str(path) for path in paths],
        in_memory,
        store,
        CommitLog(paths),
        IOQueue(store),
        Arena(),
        link or HostLink(),
        clock,
        locks,
    )


def _check_writable(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"offload_dir={str(path)!r} cannot be written to: {error.strerror}. Give a "
            f"directory on a "
            "drive that this user may write to."
        ) from error


def _check_existing(paths: list[Path], on_existing: OnExisting) -> None:
    latest = CommitLog(paths).latest()
    foreign = [
        path for path in paths if (path / "pages").is_dir() and any((path / "pages").iterdir())
    ]
    if (latest is None and not foreign) or on_existing == "overwrite":
        return
    what = (
        f"a run committed at step {latest.step}" if latest is not None else "pages of another run"
    )
    where = ", ".join(str(path) for path in paths)
    raise ConfigError(
        f"offload_dir={where} holds {what}. Set on_existing='overwrite' to discard it, give "
        f"another "
        "offload_dir, or delete the directory. (Resuming from it comes in a later version.)"
    )


def _remove_run(path: Path) -> None:
    shutil.rmtree(path / "pages", ignore_errors=True)
    for name in _RECORDS:
        (path / name).unlink(missing_ok=True)


def remove_directories(directories: Sequence[str]) -> None:
    """Delete the directories of a run that nobody asked to keep."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def ram_limit_bytes(max_ram_gb: float | None) -> int:
    """Return the host budget in bytes: what was given, or 80 % of what is free."""
    if max_ram_gb is not None:
        return int(max_ram_gb * GIB)
    free = psutil.virtual_memory().available
    cgroup = cgroup_free_bytes()
    return int(_RAM_SHARE * (free if cgroup is None else min(free, cgroup)))


def cgroup_free_bytes() -> int | None:
    """Return what this process's memory cgroup leaves free, None where there is no limit."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            text = Path(limit).read_text().strip()
            if text == "max" or int(text) >= 1 << 60:
                return None
            return max(0, int(text) - int(Path(usage).read_text()))
        except (OSError, ValueError):
            continue
    return None


def check_disk(
    machine: Machine, old: dict[str, int], new: dict[str, int], max_disk_gb: float | None
) -> None:
    """Raise BudgetError when the files of a run, slots included, do not fit.

    Args:
        machine: The tiers.
        old: Files that exist, which the new ones take the place of, and their lengths.
        new: Files that will be made.
        max_disk_gb: The ceiling, None for what is free.
    """
    needed_bytes = sum(new.values())
    if max_disk_gb is not None and needed_bytes > max_disk_gb * GIB:
        raise _disk_error(
            needed_bytes, f"max_disk_gb={max_disk_gb:g} allows less", "Raise max_disk_gb"
        )
    devices: dict[int, str] = {}
    for directory in machine.directories:
        devices.setdefault(os.stat(directory).st_dev, directory)
    free = sum(max(0, free_bytes(d) - _DISK_MARGIN_BYTES) for d in devices.values())
    free += sum(old.values())
    if needed_bytes > free:
        where = ", ".join(machine.directories)
        raise _disk_error(
            needed_bytes,
            f"only {free / GIB:.2f} GiB are free in offload_dir={where} (1 GiB per drive is left)",
            "Free some space, or give a list of directories on several drives as offload_dir",
        )


def _disk_error(needed_bytes: int, limit: str, remedy: str) -> BudgetError:
    error = BudgetError(
        f"the run needs {needed_bytes / GIB:.3f} GiB on disk (two slots of every page), but "
        f"{limit}. "
        f"{remedy}."
    )
    error.smallest_gb = needed_bytes / GIB
    return error
