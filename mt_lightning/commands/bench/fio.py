"""fio beside our own measurements: the same files, blocks and depth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mt_lightning.errors import StorageError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.header import HEADER_BYTES

_ENGINES = ("io_uring", "libaio")
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Buffers on huge pages, as ours are: without them fio is slower."""
_LIMIT_S = 600.0
_PROBE_BYTES = BLOCK_BYTES


@dataclass(frozen=True)
class Run:
    """What fio moved.

    Attributes:
        read_bytes_per_s: Rate of reads, 0 where none was asked for.
        write_bytes_per_s: Rate of writes, 0 where none was asked for.
        cpu_s: Processor time, of the program and of the kernel.
        num_bytes: Bytes read and written.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    cpu_s: float
    num_bytes: int


class Fio:
    """An installed fio.

    Args:
        engine: How it asks the kernel.
        direct: Whether around the page cache.
        depth: Operations in flight for each file.
    """

    def __init__(self, engine: str, direct: bool, depth: int) -> None:
        self.engine = engine
        self._direct = direct
        self._depth = depth

    @classmethod
    def find(cls, probe: Path, direct: bool, depth: int) -> Fio | None:
        """Return fio with the first engine that works here, None where there is none.

        Args:
            probe: A page file of at least one block, which is read.
            direct: Whether around the page cache.
            depth: Operations in flight for each file.
        """
        if shutil.which("fio") is None:
            return None
        for engine in _ENGINES:
            fio = cls(engine, direct, depth)
            try:
                fio.run([probe], [], _PROBE_BYTES)
            except StorageError:
                continue
            return fio
        return None

    def run(self, reads: Sequence[Path], writes: Sequence[Path], nbytes: int) -> Run:
        """Read and write the payloads of page files, all at once.

        Args:
            reads: Files to read.
            writes: Files to write over and to sync at the end.
            nbytes: Bytes of each.

        Raises:
            StorageError: fio failed; the message is its own.
        """
        files = [(path, "read") for path in reads] + [(path, "write") for path in writes]
        command = ["fio", "--output-format=json"]
        for number, (path, verb) in enumerate(files):
            command += [
                f"--name=megatrain-{number}",
                # A colon separates names.
                f"--filename={str(path).replace(':', chr(92) + ':')}",
                f"--offset={HEADER_BYTES}",
                f"--size={nbytes}",
                f"--bs={BLOCK_BYTES}",
                f"--rw={verb}",
                f"--ioengine={self.engine}",
                f"--iodepth={self._depth}",
                f"--direct={int(self._direct)}",
                "--end_fsync=1",
                "--allow_file_create=0",
                "--thread",
            ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
                env={**os.environ, **_HUGE_PAGES},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StorageError(None, f"fio did not run: {error}", str(files[0][0])) from error
        start = done.stdout.find("{")
        if done.returncode or start < 0:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise StorageError(None, f"fio failed ({done.returncode}): {said}", str(files[0][0]))
        return _summary(json.loads(done.stdout[start:])["jobs"])


def _summary(jobs: Sequence[dict]) -> Run:
    rates = {"read": 0.0, "write": 0.0}
    cpu_s, num_bytes = 0.0, 0
    for verb in rates:
        moved = [job for job in jobs if job[verb]["io_bytes"]]
        if moved:
            # Until the last one is done, syncs included.
            slowest_s = max(job["job_runtime"] for job in moved) / 1e3
            total = sum(job[verb]["io_bytes"] for job in moved)
            rates[verb] = total / slowest_s
            num_bytes += total
    for job in jobs:
        cpu_s += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Run(rates["read"], rates["write"], cpu_s, num_bytes)
