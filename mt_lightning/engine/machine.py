"""Open the tiers of one run: directories, lock, files, commit log, memory and device link."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mt_lightning.engine.options import OnExisting
from mt_lightning.errors import BudgetError, ConfigError, StorageError
from mt_lightning.tiers.accelerator import AcceleratorLink
from mt_lightning.tiers.arena import Arena
from mt_lightning.tiers.checkpoint_files import clean, folders_in, kept_bytes, shared_bytes
from mt_lightning.tiers.commit import CommitLog, CommitRecord
from mt_lightning.tiers.device import TorchDevice
from mt_lightning.tiers.direct import DirectStorage, open_direct
from mt_lightning.tiers.filesystem import free_bytes, is_memory, kind
from mt_lightning.tiers.heap import keep_freed_memory
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.ledger import Ledger
from mt_lightning.tiers.link import HostLink, Link
from mt_lightning.tiers.lock import DirectoryLock
from mt_lightning.tiers.manifest_reader import id_of
from mt_lightning.tiers.patience import DISK_FULL_TIMEOUT_S, Patience
from mt_lightning.tiers.steady import SteadyLog, SteadyStore, WatchedLink
from mt_lightning.tiers.store import FileStore, Store
from mt_lightning.tiers.watch import Watch

log = logging.getLogger(__name__)

GIB = 1 << 30
CPU = torch.device("cpu")
_DISK_MARGIN_BYTES = 1 << 30
_RECORDS = ("commit.0", "commit.1")
LAYOUT_NAME = "layout-{}.json"
"""The file that describes the pages of a run, by the hash of what it says."""
KEPT_PREFIX = "kept-"
"""Begins the names of files in which the loop that trains keeps what does not change."""
_PAGE_FILE = re.compile(r"(p\d+\.(weight|state|grad)|i\d+\.input)\.\d(\.new)?")


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
        patience: How long the drive is given.
        watch: Names what stalls.
        record: The commit that a run goes on from, None for a new run.
        training: Where the time of the training thread goes.
        working: Where that of the update worker goes.
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
    patience: Patience
    watch: Watch
    record: CommitRecord | None
    training: Ledger
    working: Ledger

    def close(self, *, remove: bool = False) -> None:
        """End threads, close files and give the directory back; with `remove`, delete it."""
        self.patience.end()
        try:
            self.io.close()
        except StorageError as error:
            # No commit counts on what nobody waited for, and the rest must be let go of.
            log.warning("an operation that nobody waited for had failed: %s", error)
        self.watch.close()
        self.store.close()
        self.link.close()
        self.arena.close()
        for lock in self.locks:
            lock.release()
        if remove:
            remove_directories(self.directories)


def open_machine(
    directories: Sequence[str],
    on_existing: OnExisting,
    *,
    device: torch.device = CPU,
    link: Link | None = None,
    wrap_store: Callable[[Store], Store] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    disk_full_timeout_s: float = DISK_FULL_TIMEOUT_S,
    direct_storage: DirectStorage = False,
) -> Machine:
    """Lock the directories and open everything in them.

    Raises:
        ConfigError: A directory cannot be used, is in use, or holds a committed run.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"paging needs Linux (direct I/O, private mappings); this is "
            f"{sys.platform}. "
            "Run it on Linux, in WSL 2 or in a container, or use strategy='auto'."
        )
    paths = [_path(directory) for directory in directories]
    if len(set(paths)) != len(paths):
        raise ConfigError(f"offload_dir={list(directories)}: a directory is named twice.")
    keep_freed_memory()
    fresh = [path for path in paths if not path.exists()]
    locks: list[DirectoryLock] = []
    try:
        for path in paths:
            _check_writable(path)
            lock = DirectoryLock(path)
            lock.acquire()
            locks.append(lock)
        for path in paths:
            clean(path, id_of)
        paths = _check_existing(paths, on_existing)
        record = CommitLog(paths).latest() if on_existing == "resume" else None
        if record is not None and not record.step:
            _check_nothing_begun(record)
            record = None
        if record is None:
            for path in paths:
                _remove_run(path)
        in_memory = any(is_memory(path) for path in paths)
        if in_memory:
            log.warning(
                "offload_dir is on a memory file system (%s): its bytes are charged to max_ram_gb. "
                "Use a directory on a drive.",
                ", ".join(kind(path) for path in paths),
            )
        if link is None and device.type != "cpu":
            link = AcceleratorLink(TorchDevice(device))
        store: Store = FileStore(paths, direct=open_direct(direct_storage, device.type))
        if wrap_store is not None:
            store = wrap_store(store)
    except BaseException:
        for lock in locks:
            lock.release()
        for path in fresh:
            shutil.rmtree(path, ignore_errors=True)
        raise
    patience, watch = Patience(disk_full_timeout_s), Watch()
    store = SteadyStore(store, patience, watch)
    machine = Machine(
        [str(path) for path in paths],
        in_memory,
        store,
        SteadyLog(paths, patience, watch),
        IOQueue(store, clock=clock),
        Arena(),
        WatchedLink(link, watch) if link is not None else HostLink(),
        clock,
        locks,
        patience,
        watch,
        record,
        Ledger(clock),
        Ledger(clock),
    )
    watch.queued = lambda: machine.io.num_queued
    watch.start()
    return machine


def _path(directory: str) -> Path:
    try:
        return Path(os.path.realpath(Path(directory).expanduser()))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"offload_dir={directory!r} is not a path: {error}") from error


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


def _check_existing(paths: list[Path], on_existing: OnExisting) -> list[Path]:
    """Refuse what must not be touched; return the directories, the one with the commits first."""
    found = [file for path in paths for file in sorted(path.glob("pages/*"))]
    for file in found:
        if not _PAGE_FILE.fullmatch(file.name):
            raise ConfigError(
                f"offload_dir={str(file.parents[1])!r}: {file} is no page of a run, and nothing "
                "but pages may be in that folder. Give another offload_dir."
            )
    records = {path: record for path in paths if (record := CommitLog([path]).latest())}
    if len(records) > 1 and on_existing == "resume":
        raise ConfigError(
            f"offload_dir names several runs: {', '.join(map(str, records))} each hold commits. "
            "Give the directories of one run."
        )
    where = ", ".join(str(path) for path in paths)
    if found and not records and on_existing != "overwrite":
        # Nothing is deleted: the commits may lie on a drive that is not mounted.
        raise ConfigError(
            f"offload_dir={where} holds pages, but no readable commit names them: a directory of "
            "the run may be missing from the list or not mounted, both commit records may be "
            "damaged, or the run ended before its first commit. Give all directories of the run, "
            "or set on_existing='overwrite' to discard the pages."
        )
    if on_existing != "error" or not (records or found):
        return sorted(paths, key=lambda path: path not in records)
    what = f"a run committed at step {max(record.step for record in records.values())}"
    raise ConfigError(
        f"offload_dir={where} holds {what}. Set on_existing='resume' to go on with it, "
        "on_existing='overwrite' to discard it, give another offload_dir, or delete the directory."
    )


def _check_nothing_begun(record: CommitRecord) -> None:
    """Raise ConfigError when a run that has no step cannot start anew without a loss."""
    if record.meta.get("begun"):
        raise ConfigError(
            "offload_dir holds weights that were loaded, or trained by an earlier fit, and the "
            "last fit took no step from which it could go on. Load a checkpoint and set "
            "on_existing='overwrite'."
        )
    log.warning("offload_dir holds no step yet: the run starts from the beginning.")


def _remove_run(path: Path) -> None:
    shutil.rmtree(path / "pages", ignore_errors=True)
    for pattern in (*_RECORDS, LAYOUT_NAME.format("*"), f"{KEPT_PREFIX}*"):
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)


def fresh_directory(root: str | os.PathLike[str]) -> str:
    """Make the directory of a run that was given none, and return its path."""
    parent = Path(root) / "megatrain"
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            (parent / f"run_{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return str(parent / f"run_{number}")


def remove_directories(directories: Sequence[str]) -> None:
    """Delete the directories of a run that nobody asked to keep, but for its checkpoints."""
    for directory in map(Path, directories):
        if folders_in(directory):
            log.info("%s is kept: linked checkpoints live in it.", directory)
            _remove_run(directory)
            continue
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.parent.rmdir()  # only succeeds when no other run lies beside it


def max_disk_bytes(max_disk_gb: float | None) -> int | None:
    """Return the ceiling on disk in bytes, None for what is free."""
    return None if max_disk_gb is None else int(max_disk_gb * GIB)


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
    # Slots that a linked checkpoint holds on to are replaced: they are needed once more.
    needed_bytes = sum(new.values()) + kept_bytes(machine.directories)
    if max_disk_gb is not None and needed_bytes > max_disk_gb * GIB:
        raise _disk_error(
            needed_bytes, f"max_disk_gb={max_disk_gb:g} allows less", "Raise max_disk_gb"
        )
    devices: dict[int, str] = {}
    for directory in machine.directories:
        try:
            devices.setdefault(os.stat(directory).st_dev, directory)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"offload_dir is gone: {error.strerror}. Make a new Trainer and strategy",
                directory,
            ) from error
    free = sum(max(0, free_bytes(d) - _DISK_MARGIN_BYTES) for d in devices.values())
    free += sum(old.values()) + kept_bytes(machine.directories) - shared_bytes(machine.directories)
    if needed_bytes > free:
        where = ", ".join(machine.directories)
        raise _disk_error(
            needed_bytes,
            f"only {free / GIB:.2f} GiB are free in offload_dir={where} (1 GiB per drive is left)",
            "Free some space, or give a list of directories on several drives as offload_dir",
        )


def _disk_error(needed_bytes: int, limit: str, remedy: str) -> BudgetError:
    smallest_gb = math.ceil(needed_bytes / GIB * 1e6) / 1e6
    error = BudgetError(
        f"the run needs {smallest_gb:.6f} GiB on disk (two slots of every page, and linked "
        f"checkpoints), but {limit}. "
        f"{remedy}."
    )
    error.smallest_gb = smallest_gb
    return error
