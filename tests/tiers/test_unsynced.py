"""What a power cut could take is known: after writes, failed syncs, fresh names and a reopening."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mt_lightning.errors import CorruptPageError, StorageError
from mt_lightning.tiers import pagefile, store
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.store import FileStore
from mt_lightning.tiers.unsynced import Unsynced

NAMES = ["p00000.weight.0", "p00001.weight.0", "p00002.weight.0"]
Fill = Callable[..., Frame]


def full(directory: Path, filled: Fill) -> FileStore:
    files = FileStore([directory])
    for name in NAMES:
        files.create(name, 8192)
        files.write(name, 0, filled(8192).memory)
    return files


def test_files_need_a_sync_until_they_had_one(tmp_path: Path, filled: Fill) -> None:
    files = full(tmp_path, filled)
    assert files.unsynced(NAMES) == NAMES
    for name in NAMES[:2]:
        files.sync(name)
    assert files.unsynced(NAMES) == NAMES[2:]
    files.write(NAMES[0], 4096, filled(4096).memory)
    files.replace(NAMES[1])
    assert files.unsynced(NAMES) == NAMES
    files.delete(NAMES[1])
    assert files.unsynced(NAMES) == [NAMES[0], NAMES[2]]


def test_of_files_that_were_there_nobody_knows(tmp_path: Path, filled: Fill) -> None:
    files = full(tmp_path, filled)
    for name in NAMES:
        files.sync(name)
    files.close()
    assert FileStore([tmp_path]).unsynced(NAMES) == NAMES


def test_a_sync_or_write_that_fails_leaves_a_file_unsynced(
    tmp_path: Path, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = full(tmp_path, filled)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(pagefile.os, "fdatasync", fail)
        with pytest.raises(StorageError, match="sync failed"):
            files.sync(NAMES[0])
    with monkeypatch.context() as patch:
        patch.setattr(store, "sync_directory", fail)
        with pytest.raises(StorageError, match="sync of a directory"):
            files.sync(NAMES[1])
    assert files.unsynced(NAMES) == NAMES
    for name in NAMES:
        files.sync(name)
    assert files.unsynced(NAMES) == []
    with monkeypatch.context() as patch:
        patch.setattr(pagefile.os, "pwritev", fail)
        with pytest.raises(StorageError, match="failed after 0"):
            files.write(NAMES[0], 0, filled(8192).memory)
    assert files.unsynced(NAMES) == [NAMES[0]]


def test_a_directory_is_synced_once_for_all_its_new_names(
    tmp_path: Path, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, synced = full(tmp_path, filled), []
    monkeypatch.setattr(store, "sync_directory", synced.append)
    for name in NAMES:
        files.sync(name)
    assert synced == [str(tmp_path / "pages")]


def test_what_happens_during_a_sync_is_not_durable() -> None:
    unsynced = Unsynced()
    unsynced.written("a")
    with unsynced.syncing("a"):
        unsynced.written("a")
    assert unsynced.among("a") == ["a"]
    with unsynced.syncing("a"):
        pass
    unsynced.named("b", "here")
    with unsynced.syncing("b"):
        pass
    unsynced.sync_name("b", lambda directory: unsynced.named("b", directory))
    assert unsynced.among("ab") == ["b"]


def test_nobody_counts_on_the_sync_of_another_before_it_has_ended() -> None:
    unsynced, begun, go, ended = Unsynced(), threading.Event(), threading.Event(), []
    unsynced.named("a", "here")
    unsynced.named("b", "here")

    def slow(directory: str) -> None:
        del directory
        begun.set()
        assert go.wait(10)
        ended.append("sync")

    def second() -> None:
        unsynced.sync_name("b", lambda directory: ended.append(directory))
        ended.append("b")

    threads = [threading.Thread(target=unsynced.sync_name, args=("a", slow))]
    threads[0].start()
    assert begun.wait(10)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    threads[1].join(0.05)
    go.set()
    for thread in threads:
        thread.join(10)
    assert ended == ["sync", "b"]


def test_a_file_that_is_opened_again_is_not_read_again_unless_it_is_another(
    tmp_path: Path, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, read = full(tmp_path, filled), []
    assert files.size(NAMES[0]) == 8192
    monkeypatch.setattr(pagefile.PageFiles, "read", lambda *_: read.append(1))
    files.trim()
    assert files.size(NAMES[0]) == 8192
    assert read == []
    monkeypatch.undo()
    files.trim()
    path = tmp_path / "pages" / NAMES[0]
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(CorruptPageError, match="payload bytes differ"):
        files.size(NAMES[0])
    files.trim()
    other = tmp_path / "other"
    other.write_bytes((tmp_path / "pages" / NAMES[1]).read_bytes())
    other.replace(path)
    with pytest.raises(CorruptPageError, match="name differs"):
        files.size(NAMES[0])
