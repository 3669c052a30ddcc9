from __future__ import annotations

import contextlib
import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.tiers.commit import CommitLog, CommitRecord
from mt_lightning.tiers.doubles import MemoryCommitLog


def record(sequence: int, num_sums: int = 3) -> CommitRecord:
    shared = torch.arange(6.0)
    return CommitRecord(
        sequence=sequence,
        step=2 * sequence,
        fingerprint="abc",
        slots={"p00000.weight": sequence % 2, "p00000.state": 0},
        sums={
            "p00000.weight": np.arange(num_sums, dtype=np.uint64) + np.uint64(2**64 - 9000),
            "p00000.state": np.zeros(0, dtype=np.uint64),
        },
        tensors={
            "a": shared[:4],
            "b": shared.view(2, 3).t(),
            "scalar": torch.tensor(3, dtype=torch.int64),
            "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        },
        meta={"epoch": 1, "names": ["x", None], "loss": 0.1},
    )


def assert_equal(found: CommitRecord, expected: CommitRecord) -> None:
    for field in ("sequence", "step", "fingerprint", "slots", "meta"):
        assert getattr(found, field) == getattr(expected, field)
    assert list(found.sums) == list(expected.sums)
    for name, sums in expected.sums.items():
        assert found.sums[name].dtype == np.uint64
        np.testing.assert_array_equal(found.sums[name], sums)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def reseal(data: bytes) -> bytes:
    """Make changed bytes pass the checksum, so that the parsers behind it are reached."""
    body = bytearray(data[:-8])
    body[8:16] = struct.pack("<Q", len(data))
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_roundtrip() -> None:
    data = record(5).to_bytes()
    assert_equal(CommitRecord.from_bytes(data), record(5))
    assert_equal(CommitRecord.from_bytes(data + bytes(100)), record(5))
    bare = CommitRecord(sequence=0, step=0, fingerprint="", slots={})
    assert_equal(CommitRecord.from_bytes(bare.to_bytes()), bare)


def test_any_lost_or_changed_byte_is_found() -> None:
    data = record(5).to_bytes()
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 0x10
        for torn in (bytes(changed), data[:position]):
            with pytest.raises(CorruptPageError):
                CommitRecord.from_bytes(torn)


@given(st.binary(max_size=200))
def test_garbage_raises_only_corruption(data: bytes) -> None:
    for candidate in (data, b"MTCOMMIT" + data):
        with pytest.raises(CorruptPageError):
            CommitRecord.from_bytes(candidate)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sealed_garbage_raises_only_corruption(data: st.DataObject) -> None:
    changed = bytearray(record(5).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(changed) - 9))
        changed[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptPageError):
        CommitRecord.from_bytes(reseal(bytes(changed)))


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_latest_is_the_last_written(tmp_path: Path, kind: str) -> None:
    log = CommitLog([tmp_path, tmp_path / "unused"]) if kind == "files" else MemoryCommitLog()
    assert log.latest() is None
    for sequence in (1, 2, 3, 7):
        log.write(record(sequence))
        latest = log.latest()
        assert latest is not None
        assert_equal(latest, record(sequence))


def tear(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)


def test_torn_record_is_skipped_and_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = CommitLog([tmp_path])
    log.write(record(1))
    log.write(record(2))
    assert sorted(os.listdir(tmp_path)) == ["commit.0", "commit.1"]
    newest = next(p for p in tmp_path.iterdir() if b'"sequence": 2' in p.read_bytes())
    tear(newest)
    again = CommitLog([tmp_path])
    latest = again.latest()
    assert latest is not None
    assert latest.sequence == 1
    assert "torn" in caplog.text
    again.write(record(2))
    assert b'"sequence": 2' in newest.read_bytes()
    latest = CommitLog([tmp_path]).latest()
    assert latest is not None
    assert latest.sequence == 2
    for path in tmp_path.iterdir():
        tear(path)
    assert CommitLog([tmp_path]).latest() is None


def test_a_new_log_writes_over_the_older_record(tmp_path: Path) -> None:
    for sequence in range(1, 6):
        CommitLog([tmp_path]).write(record(sequence))
        found = {s for s in range(9) for p in tmp_path.iterdir() if f'"sequence": {s},' in text(p)}
        assert found == {sequence, sequence - 1} - {0}


def text(path: Path) -> str:
    return path.read_bytes().decode("latin-1")


def test_file_grows_with_the_record_and_is_reused(tmp_path: Path) -> None:
    log = CommitLog([tmp_path])
    log.write(record(1))
    log.write(record(2))
    inode = (tmp_path / "commit.0").stat().st_ino
    log.write(record(3, num_sums=400_000))
    latest = log.latest()
    assert latest is not None
    assert_equal(latest, record(3, num_sums=400_000))
    log.write(record(4))
    log.write(record(5))
    assert (tmp_path / "commit.0").stat().st_ino == inode
    assert (tmp_path / "commit.0").stat().st_size > 400_000 * 8
    latest = log.latest()
    assert latest is not None
    assert_equal(latest, record(5))


def test_failed_write_keeps_the_record_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog([tmp_path])
    log.write(record(1))
    log.write(record(2))
    write = os.pwrite

    def fail(fd: int, data: bytes, offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, data[:100], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        for _ in range(2):
            with pytest.raises(StorageError, match="stays at the commit before") as caught:
                log.write(record(3))
            assert caught.value.errno == errno.EIO
    latest = CommitLog([tmp_path]).latest()
    assert latest is not None
    assert latest.sequence == 2


def test_another_format_version_is_not_taken_for_a_torn_record(tmp_path: Path) -> None:
    data = bytearray(record(1).to_bytes())
    data[16] = 99
    (tmp_path / "commit.0").write_bytes(reseal(bytes(data)))
    with pytest.raises(CorruptPageError, match="format version 99"):
        CommitLog([tmp_path]).latest()
