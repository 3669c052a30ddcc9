"""The two commit records of a run: which of them can be read, and what they need."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mt_lightning.commands.verify.report import Report
from mt_lightning.engine.commit import RUN_KEY
from mt_lightning.engine.pieces import PIECES_KEY
from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.resume.description import DESCRIPTION_KEY
from mt_lightning.resume.packer import unpack
from mt_lightning.tiers.commit import CommitRecord, is_sealed

RECORD_NAMES = ("commit.0", "commit.1")


@dataclass(frozen=True)
class FoundRecord:
    """A commit record that can be read.

    Attributes:
        path: Its file.
        record: What it says.
        age_s: Seconds since the file was written.
    """

    path: Path
    record: CommitRecord
    age_s: float


def find_records(directories: list[Path], report: Report) -> list[FoundRecord]:
    """Read all commit records, newest first; say how each is."""
    found: list[FoundRecord] = []
    broken: list[tuple[str, str]] = []
    for path in (directory / name for directory in directories for name in RECORD_NAMES):
        try:
            data = path.read_bytes()
            age_s = max(0.0, time.time() - os.stat(path).st_mtime)
        except FileNotFoundError:
            continue
        except OSError as error:
            report.blame(path.name, f"{path}: {error.strerror}", "Check the drive.")
            continue
        if not any(data[:4096]):
            report.say(path.name, "not written yet")
        elif not is_sealed(data):
            broken.append((path.name, str(path)))
        else:
            try:
                found.append(FoundRecord(path, CommitRecord.from_bytes(data), age_s))
            except CorruptPageError as error:
                report.blame(path.name, f"{path}: {error.strerror}", _OTHER_VERSION)
    found.sort(key=lambda each: each.record.sequence, reverse=True)
    for name, where in broken:
        if found:
            report.warn(
                name,
                f"{where}: torn or garbage",
                "A crash in a commit leaves this. The other record stands for the run; the next "
                "commit replaces this one.",
            )
        else:
            report.blame(name, f"{where}: torn or garbage", _NO_RECORD)
    for each in reversed(found):
        record = each.record
        report.say(
            each.path.name,
            f"step {record.step}, record {record.sequence}",
        )
    return found


_OTHER_VERSION = "Read it with the release that wrote it; a whole record of this release is not so."
_NO_RECORD = (
    "Without a record nobody knows which slots hold the run. Restore commit.0 or commit.1 from a "
    "copy, or start from a checkpoint with on_existing='overwrite'."
)


def needed_small_files(record: CommitRecord) -> set[str] | None:
    """Return the small files that a commit needs, None where that cannot be told."""
    names = {record.meta.get("layout"), record.meta.get(PIECES_KEY)}
    state = record.tensors.get(RUN_KEY)
    if state is not None:
        try:
            run_state = unpack(state.numpy().tobytes())
        except StorageError:
            return None
        names |= {run_state.get("kept_buffers"), run_state.get(DESCRIPTION_KEY)}
    return {name for name in names if isinstance(name, str)}


def age(seconds: float) -> str:
    """Return a length of time as people say it."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}s"
    return f"{int(seconds)} s"
