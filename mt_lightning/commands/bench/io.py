"""`megatrain bench io`: what drives move by the code that moves pages, with fio beside it.

[Note: how it is timed]
Page files are made, written and read by the store and the I/O threads of a training run: blocks of
4 MiB around the page cache, summed when written and compared when read, a sync at the end of the
writes. fio, where it is installed, moves the same files with as many operations in flight. All take
turns, so that whatever else the machine does hits all alike; rates are medians of the rounds, and
so is the ratio of each round.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import Progress

from mt_lightning.commands.bench.fio import Fio, Run
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.planning.profile import DriveRates, device_of
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.filesystem import free_bytes, is_memory, kind
from mt_lightning.tiers.io import IOQueue, Ticket
from mt_lightning.tiers.patience import Patience
from mt_lightning.tiers.steady import SteadyStore
from mt_lightning.tiers.store import FileStore
from mt_lightning.tiers.watch import Watch

ALL = "all"
"""Stands for every directory at once."""
READ = "read"
UNCHECKED = "read, no sums"
WRITE = "write"
BOTH = "both at once"
_OPERATIONS = (READ, UNCHECKED, WRITE, BOTH)
_NUM_AHEAD = 6
"""Blocks of each file that are under way or wait for a thread: few, so that buffers stay in the
processor's cache as those of fio do. Pages are larger than caches."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Moved:
    """What was moved in one way.

    Attributes:
        directory: Where, or `ALL`.
        operation: How.
        direct: Whether around the page cache.
        in_memory: Whether the files lie in RAM, so that no drive was measured.
        read_bytes_per_s: Rate of reads, 0 where there were none.
        write_bytes_per_s: Rate of writes, the sync included, 0 where there were none.
        cpu_s_per_gib: Processor time of each GiB.
        fio_bytes_per_s: Reads and writes of fio, None where it was not run.
        fio_cpu_s_per_gib: Processor time of it.
        of_fio: Our rate over that of fio in the same round.
    """

    directory: str
    operation: str
    direct: bool
    in_memory: bool
    read_bytes_per_s: float
    write_bytes_per_s: float
    cpu_s_per_gib: float
    fio_bytes_per_s: float | None = None
    fio_cpu_s_per_gib: float | None = None
    of_fio: float | None = None


def measure(
    directories: Sequence[Path],
    num_bytes: int,
    num_rounds: int,
    progress: Progress,
    *,
    with_fio: bool = True,
) -> list[Moved]:
    """Measure each directory, and all at once where there are several.

    Args:
        directories: Existing ones; nothing is left in them.
        num_bytes: Bytes that each operation moves in each directory; twice as many are taken.
        num_rounds: How often all take turns.
        progress: Where to show how far it is.
        with_fio: Whether fio runs beside it where it is installed.

    Raises:
        ConfigError: There is no such directory, or too little room in it.
        StorageError: A drive failed.
    """
    num_bytes = max(1, round(num_bytes / BLOCK_BYTES)) * BLOCK_BYTES
    for directory in directories:
        _check(directory, num_bytes)
    groups = [[directory] for directory in directories]
    if len(directories) > 1:
        groups.append(list(directories))
    task = progress.add_task("io", total=len(groups) * num_rounds * len(_OPERATIONS))
    results = []
    for group in groups:
        with _rig(group, num_bytes) as rig:
            fio = None
            if with_fio:
                fio = Fio.find(rig.paths(READ)[0], rig.direct, rig.depth)
            runs: dict[str, list[tuple[Run, Run | None]]] = {name: [] for name in _OPERATIONS}
            for _ in range(num_rounds):
                for operation in _OPERATIONS:
                    ours = rig.run(operation)
                    runs[operation].append((ours, _beside(fio, rig, operation)))
                    progress.advance(task)
            where = ALL if len(group) > 1 else str(group[0])
            in_memory = any(is_memory(directory) for directory in group)
            results += [
                _summary(where, operation, rig.direct, in_memory, runs[operation])
                for operation in _OPERATIONS
            ]
    return results


def _check(directory: Path, num_bytes: int) -> None:
    if not directory.is_dir():
        raise ConfigError(f"bench io: {directory} is no directory; name one on the drive to test.")
    room = free_bytes(directory)
    needed = 2 * num_bytes + BLOCK_BYTES
    if needed > room:
        raise ConfigError(
            f"bench io: {needed / _GIB:.2f} GiB are needed in {directory} (two files), "
            f"{room / _GIB:.2f} GiB are free. Lower --size."
        )


class _Rig:
    """Files to read and to write in some directories, and what moves them."""

    def __init__(self, stores: Sequence[Path], num_bytes: int) -> None:
        self._files = FileStore(stores)
        self._watch = Watch()
        self._queue = IOQueue(SteadyStore(self._files, Patience(0), self._watch))
        self._num_bytes = num_bytes
        self._names: dict[str, list[str]] = {READ: [], WRITE: []}
        self._sums: dict[str, list[int]] = {}
        self._frames: dict[str, list[Frame]] = {}
        for verb, names in self._names.items():
            for number in range(len(stores)):
                # Of equally empty directories the store takes one after the other.
                name = f"p{number:05d}.{verb}.0"
                self._files.create(name, num_bytes)
                names.append(name)
                self._frames[name] = [_frame(number) for _ in range(_NUM_AHEAD)]
        for name in self._names[READ]:
            self._write([name])

    def run(self, operation: str) -> Run:
        """Move everything once."""
        reads = [] if operation == WRITE else self._names[READ]
        writes = self._names[WRITE] if operation in (WRITE, BOTH) else []
        cpu_s, start_s = time.process_time(), time.perf_counter()
        self._move(reads, writes, checked=operation != UNCHECKED)
        self._queue.sync(writes).wait()
        seconds = time.perf_counter() - start_s
        cpu_s = time.process_time() - cpu_s
        read_bytes, written = (self._num_bytes * len(names) for names in (reads, writes))
        return Run(read_bytes / seconds, written / seconds, cpu_s, read_bytes + written)

    def paths(self, verb: str) -> list[Path]:
        """Return the files to read or to write."""
        return [self._files.path_of(name) for name in self._names[verb]]

    @property
    def direct(self) -> bool:
        """Whether I/O goes around the page cache."""
        return self._files.direct

    @property
    def depth(self) -> int:
        """Operations in flight for each file; the files of a drive share its threads."""
        names = self._names[READ]
        num_drives = len({self._files.drive_of(name) for name in names})
        return max(1, self._queue.num_threads * num_drives // len(names))

    @property
    def num_bytes(self) -> int:
        """Bytes of each file."""
        return self._num_bytes

    def close(self) -> None:
        """End the threads and close the files."""
        try:
            self._queue.close()
        finally:
            self._watch.close()
            self._files.close()

    def _write(self, names: list[str]) -> None:
        tickets = self._move([], names, checked=False)
        self._queue.sync(names).wait()
        for name in names:
            self._sums[name] = [number for ticket in tickets[name] for number in ticket.sums]

    def _move(
        self, reads: Sequence[str], writes: Sequence[str], *, checked: bool
    ) -> dict[str, list[Ticket]]:
        tickets: dict[str, list[Ticket]] = {name: [] for name in (*reads, *writes)}
        for part, offset in enumerate(range(0, self._num_bytes, BLOCK_BYTES)):
            for name, under_way in tickets.items():
                if part >= _NUM_AHEAD:
                    under_way[part - _NUM_AHEAD].wait()
                pieces = [(offset, self._frames[name][part % _NUM_AHEAD].memory)]
                if name in writes:
                    under_way.append(self._queue.write(name, pieces))
                    continue
                sums = self._sums[name][part : part + 1] if checked else None
                under_way.append(self._queue.read(name, pieces, sums))
        for under_way in tickets.values():
            for ticket in under_way:
                ticket.wait()
        return tickets


def _frame(seed: int) -> Frame:
    frame = Frame(BLOCK_BYTES)
    frame.tensor.random_(generator=torch.Generator().manual_seed(seed))
    return frame


@contextmanager
def _rig(directories: Sequence[Path], num_bytes: int) -> Iterator[_Rig]:
    folders: list[Path] = []
    try:
        for directory in directories:
            try:
                folders.append(Path(tempfile.mkdtemp(prefix=".megatrain-bench-", dir=directory)))
            except OSError as error:
                raise StorageError(
                    error.errno, f"bench io cannot write there: {error.strerror}", str(directory)
                ) from error
        rig = _Rig(folders, num_bytes)
        try:
            yield rig
        finally:
            rig.close()
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _beside(fio: Fio | None, rig: _Rig, operation: str) -> Run | None:
    if fio is None:
        return None
    reads = [] if operation == WRITE else rig.paths(READ)
    writes = rig.paths(WRITE) if operation in (WRITE, BOTH) else []
    return fio.run(reads, writes, rig.num_bytes)


def _summary(
    where: str,
    operation: str,
    direct: bool,
    in_memory: bool,
    runs: Sequence[tuple[Run, Run | None]],
) -> Moved:
    ours = [run for run, _ in runs]
    pairs = [(run, other) for run, other in runs if other is not None]
    moved = Moved(
        where,
        operation,
        direct,
        in_memory,
        statistics.median(run.read_bytes_per_s for run in ours),
        statistics.median(run.write_bytes_per_s for run in ours),
        statistics.median(_cpu(run) for run in ours),
    )
    if not pairs:
        return moved
    return Moved(
        **{
            **asdict(moved),
            "fio_bytes_per_s": statistics.median(_rate(other) for _, other in pairs),
            "fio_cpu_s_per_gib": statistics.median(_cpu(other) for _, other in pairs),
            "of_fio": statistics.median(_rate(run) / _rate(other) for run, other in pairs),
        }
    )


def _rate(run: Run) -> float:
    return run.read_bytes_per_s + run.write_bytes_per_s


def _cpu(run: Run) -> float:
    return run.cpu_s * _GIB / run.num_bytes


def drive_rates(results: Sequence[Moved]) -> tuple[DriveRates, ...]:
    """Return what a machine profile keeps of the results: every drive once.

    Files in RAM are no drive and are left out.
    """
    drives: dict[str, DriveRates] = {}
    for where in dict.fromkeys(moved.directory for moved in results):
        by_operation = {moved.operation: moved for moved in results if moved.directory == where}
        read, write, both = (by_operation[name] for name in (READ, WRITE, BOTH))
        if where == ALL or read.in_memory:
            continue
        directory = str(Path(where).resolve())
        device = device_of(directory)
        drives[device] = DriveRates(
            directory=directory,
            device=device,
            file_system=kind(directory),
            direct=read.direct,
            read_bytes_per_s=read.read_bytes_per_s,
            write_bytes_per_s=write.write_bytes_per_s,
            mixed_read_bytes_per_s=both.read_bytes_per_s,
            mixed_write_bytes_per_s=both.write_bytes_per_s,
            read_cpu_s_per_gib=read.cpu_s_per_gib,
            write_cpu_s_per_gib=write.cpu_s_per_gib,
        )
    return tuple(drives.values())
