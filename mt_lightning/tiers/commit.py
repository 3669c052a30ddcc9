"""Commit records: the few bytes that make everything written for a step count, or not."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import xxhash

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.pages.sizes import align_up
from mt_lightning.tiers.advice import advice
from mt_lightning.tiers.filesystem import preallocate, sync_directory
from mt_lightning.tiers.pagefile import storage_error, write_all

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MAGIC = b"MTCOMMIT"
_PREFIX = struct.Struct("<8sQIIQQ")  # magic, bytes in all, version, JSON, sums and tensor bytes
_SUM = struct.Struct("<Q")  # xxh3_64 of everything before it
_RESERVE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class CommitRecord:
    """What a run is at the end of a step. All of it is small; the bulk lies in page files."""

    sequence: int
    """Counts records; the newest valid one is the truth."""
    step: int
    """Optimizer steps that are in the slots."""
    fingerprint: str
    """Which model and layout the slots belong to."""
    slots: dict[str, int]
    """"<page>.<plane>" -> the slot (0 or 1) that holds the committed bytes."""
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    """"<page>.<plane>" -> [num_blocks] uint64, the xxh3_64 of each block of that slot."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Small state: buffers, RNG, metrics. On the host."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Whatever else, as JSON."""

    @property
    def nbytes(self) -> int:
        """About how many bytes the record takes; only the JSON is guessed."""
        sums = sum(8 * len(value) for value in self.sums.values())
        return sums + sum(tensor.nbytes for tensor in self.tensors.values()) + 64 * len(self.slots)

    def to_bytes(self) -> bytes:
        """Encode the record. No pickle.

        Raises:
            TypeError: `meta` is not JSON.
        """
        sums = {name: np.ascontiguousarray(value, "<u8") for name, value in self.sums.items()}
        text = json.dumps(
            {
                "sequence": self.sequence,
                "step": self.step,
                "fingerprint": self.fingerprint,
                "slots": self.slots,
                "num_sums": {name: len(value) for name, value in sums.items()},
                "meta": self.meta,
            }
        ).encode()
        all_sums = b"".join(value.tobytes() for value in sums.values())
        # Cloned: safetensors refuses tensors that share memory.
        clones = {
            name: value.detach().to("cpu", copy=True).contiguous()
            for name, value in self.tensors.items()
        }
        tensors = safetensors.torch.save(clones)
        total = _PREFIX.size + len(text) + len(all_sums) + len(tensors) + _SUM.size
        prefix = _PREFIX.pack(_MAGIC, total, FORMAT_VERSION, len(text), len(all_sums), len(tensors))
        body = b"".join((prefix, text, all_sums, tensors))
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> CommitRecord:
        """Decode a record; bytes after its end are ignored.

        Raises:
            CorruptPageError: these bytes are no whole record of this version.
        """
        if not is_sealed(data):
            raise _corrupt("torn or not a record")
        _, total, version, text_bytes, sums_bytes, tensors_bytes = _PREFIX.unpack_from(data)
        if version != FORMAT_VERSION:
            raise _corrupt(f"format version {version}; this release reads {FORMAT_VERSION}")
        sizes = (_PREFIX.size, text_bytes, sums_bytes, tensors_bytes, _SUM.size)
        if sum(sizes) != total:
            raise _corrupt(f"sections of {sizes} bytes do not make {total}")
        ends = np.cumsum(sizes).tolist()
        # A sealed record that does not parse was not written by us; whatever the parsers raise,
        # it means that.
        try:
            text = json.loads(data[ends[0] : ends[1]])
            all_sums = np.frombuffer(data[ends[1] : ends[2]], "<u8").astype(np.uint64)
            return cls(
                sequence=_integer(text["sequence"]),
                step=_integer(text["step"]),
                fingerprint=str(text["fingerprint"]),
                slots={str(name): _integer(slot) for name, slot in text["slots"].items()},
                sums=_split(all_sums, text["num_sums"]),
                tensors=safetensors.torch.load(data[ends[2] : ends[3]]),
                meta=dict(text["meta"]),
            )
        except Exception as error:
            raise _corrupt(f"{type(error).__name__}: {error}") from error


def is_sealed(data: bytes) -> bool:
    """Tell whether bytes start with a whole record, of whatever version."""
    if len(data) < _PREFIX.size or not data.startswith(_MAGIC):
        return False
    total = _PREFIX.unpack_from(data)[1]
    if not _PREFIX.size + _SUM.size <= total <= len(data):
        return False
    body = memoryview(data)[: total - _SUM.size]
    return _SUM.unpack_from(data, len(body))[0] == xxhash.xxh3_64_intdigest(body)


class CommitLog:
    """Two preallocated files, `commit.0` and `commit.1`, that take turns.

    A record is written over the older of the two, in place: no allocation, one pwrite, one
    fdatasync. If that is torn, the other file still holds the record before it.

    [Note: A record that failed]
    When a write or its sync fails, nobody knows what a power cut would leave: the new record, parts
    of it, or the one before the last. As long as nothing else is written all of them are right. But
    the run goes back to the commit before, and whoever trains on writes over the slots that the
    failed record names. So it is struck out, at once or before the log is used again.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]]) -> None:
        """Use the first of the directories; nothing is written yet."""
        self._directory = Path(directories[0])
        self._next_file: int | None = None
        self._reserved_bytes = [0, 0]
        """How long each file is for sure, name included, since this process made it so."""
        self._failed: Path | None = None

    def write(self, record: CommitRecord) -> None:
        """Make a record durable.

        Raises:
            StorageError: it failed; the record before it is still there.
        """
        if self._next_file is None:
            self.latest()
        assert self._next_file is not None
        index = self._next_file
        path = self._path(index)
        data = record.to_bytes()
        try:
            # Both, so that a drive which is full by the time of the next record cannot refuse it.
            self._reserve(1 - index, len(data))
            self._reserve(index, len(data))
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._failed = path
                write_all(fd, data)
                os.fdatasync(fd)
                self._failed = None
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(
                error.errno,
                f"cannot write a commit record of {len(data)} bytes: {error.strerror}"
                f"{advice(error.errno)}; the run stays at the commit before",
                str(path),
            ) from error
        self._next_file = 1 - self._next_file

    def latest(self) -> CommitRecord | None:
        """Return the newest valid record, or None if there is none.

        Raises:
            StorageError: a file cannot be read.
            CorruptPageError: a whole record is of another format version.
        """
        self.strike_out()
        records = [self._load(self._path(index)) for index in (0, 1)]
        sequences = [-1 if record is None else record.sequence for record in records]
        newest = 1 if sequences[1] >= sequences[0] else 0
        self._next_file = 1 - newest
        return records[newest]

    def strike_out(self) -> None:
        """Make sure that a record whose write failed is none; see the note.

        Raises:
            StorageError: it cannot be written to; nothing may be written over what it names.
        """
        if self._failed is None:
            return
        try:
            fd = os.open(self._failed, os.O_RDWR | os.O_CLOEXEC)
            try:
                write_all(fd, bytes(_PREFIX.size))
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            what = "cannot strike out a commit record whose write failed"
            raise storage_error(error, what, str(self._failed)) from error
        self._failed = None

    def _reserve(self, index: int, nbytes: int) -> None:
        """Make a file long enough, and it and its name durable."""
        fd = os.open(self._path(index), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            held_bytes = os.fstat(fd).st_size
            if min(self._reserved_bytes[index], held_bytes) >= nbytes:
                return
            if held_bytes < nbytes:
                held_bytes = align_up(nbytes + _RESERVE_BYTES)
                preallocate(fd, held_bytes)
            # Also where it was long enough: whoever made it may have been killed before this.
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self._directory)
        self._reserved_bytes[index] = held_bytes

    def _path(self, index: int) -> Path:
        return self._directory / f"commit.{index}"

    @staticmethod
    def _load(path: Path) -> CommitRecord | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "cannot read a commit record", str(path)) from error
        if not any(data[: _PREFIX.size]):
            return None  # preallocated, never written
        if not is_sealed(data):
            logger.warning("Skipped the commit record %s: it was torn while written.", path)
            return None
        return CommitRecord.from_bytes(data)


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected an integer, found {value!r}")
    return value


def _split(values: np.ndarray, counts: Mapping[str, int]) -> dict[str, np.ndarray]:
    ends = np.cumsum([0, *(_integer(count) for count in counts.values())])
    if ends[-1] != len(values) or (np.diff(ends) < 0).any():
        raise ValueError(f"{len(values)} block sums do not fit the names")
    return {
        str(name): values[start:stop].copy()
        for name, start, stop in zip(counts, ends[:-1], ends[1:], strict=True)
    }


def _corrupt(reason: str) -> CorruptPageError:
    return CorruptPageError(errno.EBADMSG, f"not a valid commit record: {reason}")
