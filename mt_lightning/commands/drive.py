"""The checks of the drive under a directory: kind, room, direct I/O and speed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mt_lightning.commands.finding import Finding, Status
from mt_lightning.errors import StorageError
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.filesystem import (
    existing_parent,
    free_bytes,
    is_memory,
    kind,
    supports_direct_io,
)
from mt_lightning.tiers.io import IOQueue, Ticket
from mt_lightning.tiers.store import FileStore

_GIB = 1024**3
_GB = 10**9
_NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "beegfs", "virtiofs"}
)
_FEW_FREE_BYTES = 5 * _GIB
_SLOW_BYTES_PER_S = _GB // 2
_PROBE_BYTES = 256 * 1024**2
_PROBE_PART_BYTES = 64 * 1024**2
_PROBE_LIMIT_S = 3.0
_PROBE_NAME = "p00000.weight.0"


def diagnose_drive(directory: Path) -> Iterator[Finding]:
    """Check the drive; nothing is left behind.

    Args:
        directory: where pages would lie; if it does not exist, its nearest parent is checked.
    """
    where = existing_parent(directory)
    yield _kind(where)
    room_bytes = free_bytes(where)
    is_short = room_bytes < _FEW_FREE_BYTES
    yield Finding(
        "room",
        Status.WARN if is_short else Status.OK,
        f"{room_bytes / _GIB:.1f} GiB free",
        "A parameter takes 24 bytes on disk under AdamW (two slots): free some, or choose --dir."
        if is_short
        else "",
    )
    if not os.access(where, os.W_OK):
        yield Finding(
            "write access",
            Status.BAD,
            f"{where} is not writable",
            "Choose a directory of yours: megatrain doctor --dir DIR, strategy.offload_dir=DIR.",
        )
        return
    is_direct = supports_direct_io(where)
    yield Finding(
        "direct I/O",
        Status.OK if is_direct else Status.WARN,
        "works" if is_direct else "refused by the file system",
        "" if is_direct else "Works through the page cache, several times slower: use ext4 or xfs.",
    )
    if room_bytes > 2 * _PROBE_BYTES:
        yield _speed(where)


def _kind(where: Path) -> Finding:
    name = kind(where)
    if is_memory(where):
        status, remedy = Status.BAD, "These files live in RAM and save nothing: choose a drive."
    elif name in _NETWORK_KINDS or name.startswith("fuse"):
        status, remedy = (
            Status.WARN,
            "A network or FUSE drive is slow and may stall: use a local one.",
        )
    elif name == "overlay":
        status, remedy = Status.WARN, "A container's own layer: mount a drive (docker run -v)."
    else:
        status, remedy = Status.OK, ""
    return Finding("drive", status, f"{name} at {where}{_rotation(where)}", remedy)


def _rotation(where: Path) -> str:
    number = os.stat(where).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for folder in (device, device.parent):  # a partition has its queue in its parent
        try:
            spinning = (folder / "queue/rotational").read_text().strip() == "1"
        except OSError:
            continue
        return ", spinning or virtual" if spinning else ", solid state"
    return ""


def _speed(where: Path) -> Finding:
    try:
        read_per_s, written_per_s = measure_bytes_per_s(where)
    except StorageError as error:
        return Finding("speed", Status.BAD, str(error), "Check the drive, or choose another --dir.")
    is_slow = min(read_per_s, written_per_s) < _SLOW_BYTES_PER_S
    return Finding(
        "speed",
        Status.WARN if is_slow else Status.OK,
        f"reads {read_per_s / _GB:.2f} GB/s, writes {written_per_s / _GB:.2f} GB/s",
        "Training will wait for the drive: use NVMe, or raise max_ram_gb." if is_slow else "",
    )


def measure_bytes_per_s(directory: Path) -> tuple[float, float]:
    """Write and read a file of 256 MiB the way pages are, for at most about 3 s each.

    Args:
        directory: an existing directory; nothing is left in it.

    Returns:
        Bytes per second read and written.

    Raises:
        StorageError: the drive failed.
    """
    folder = tempfile.mkdtemp(prefix=".megatrain-doctor-", dir=directory)
    try:
        store = FileStore([folder])
        queue = IOQueue(store)
        frame = Frame(_PROBE_PART_BYTES)
        frame.tensor.random_(generator=torch.Generator().manual_seed(0))
        store.create(_PROBE_NAME, _PROBE_BYTES)
        try:

            def write(offset: int) -> Ticket:
                queue.write(_PROBE_NAME, [(offset, frame.memory)]).wait()
                return queue.sync([_PROBE_NAME])

            def read(offset: int) -> Ticket:
                return queue.read(_PROBE_NAME, [(offset, frame.memory)])

            written_per_s, written_bytes = _rate(write, _PROBE_BYTES)
            read_per_s, _ = _rate(read, written_bytes)
        finally:
            queue.close()
            store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return read_per_s, written_per_s


def _rate(move: Callable[[int], Ticket], total_bytes: int) -> tuple[float, int]:
    start_s = time.perf_counter()
    moved_bytes = 0
    while moved_bytes < total_bytes:
        move(moved_bytes).wait()
        moved_bytes += _PROBE_PART_BYTES
        if time.perf_counter() - start_s > _PROBE_LIMIT_S:
            break
    return moved_bytes / (time.perf_counter() - start_s), moved_bytes
