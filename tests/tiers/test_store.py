from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mt_lightning.errors import ConfigError, CorruptPageError, StorageError
from mt_lightning.tiers import pagefile
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.doubles import Fault, FaultyStore, MemoryStore, ThrottledStore
from mt_lightning.tiers.filesystem import O_DIRECT, is_memory, kind, supports_direct_io
from mt_lightning.tiers.store import FileStore, Store

NAME = "p00000.weight.0"
Fill = Callable[..., Frame]


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FileStore([tmp_path]) if request.param == "file" else MemoryStore()


@pytest.mark.parametrize("num_pages", [1, 3, 257, 1025])
def test_roundtrip(store: Store, filled: Fill, num_pages: int) -> None:
    frame, back = filled(num_pages * 4096), filled(num_pages * 4096, seed=1)
    store.create(NAME, frame.nbytes)
    store.write(NAME, 0, frame.memory)
    store.read(NAME, 0, back.memory)
    assert torch.equal(frame.tensor, back.tensor)
    assert store.bytes_read == store.bytes_written == store.size(NAME) == frame.nbytes


def test_pieces_do_not_touch_their_neighbours(store: Store, filled: Fill) -> None:
    store.create(NAME, 4 * 4096)
    store.write(NAME, 4096, filled(8192).memory)
    back = filled(4 * 4096, seed=1)
    store.read(NAME, 0, back.memory)
    assert back.memory[:4096] == back.memory[3 * 4096 :] == bytes(4096)
    assert back.memory[4096 : 3 * 4096] == filled(8192).memory


def test_create_is_idempotent_and_knows_its_size(store: Store, filled: Fill) -> None:
    assert not store.exists(NAME)
    store.create(NAME, 4096)
    store.write(NAME, 0, filled(4096).memory)
    store.create(NAME, 4096)
    back = filled(4096, seed=1)
    store.read(NAME, 0, back.memory)
    assert back.memory == filled(4096).memory
    with pytest.raises(CorruptPageError, match=r"payload bytes.*expected 8192, found 4096"):
        store.create(NAME, 8192)


def test_misaligned_pieces_are_refused(store: Store, filled: Fill) -> None:
    store.create(NAME, 8192)
    memory = filled(8192).memory
    for offset, piece in [
        (1, memory),
        (4096, memory),
        (0, memory[:100]),
        (0, memory[64 : 64 + 4096]),
    ]:
        with pytest.raises(AssertionError):
            store.read(NAME, offset, piece)
        with pytest.raises(AssertionError):
            store.write(NAME, offset, piece)


def test_missing_and_deleted_names(store: Store, filled: Fill) -> None:
    with pytest.raises(StorageError) as caught:
        store.read(NAME, 0, filled(4096).memory)
    assert caught.value.errno == errno.ENOENT
    store.create(NAME, 4096)
    store.delete(NAME)
    assert not store.exists(NAME)
    with pytest.raises(StorageError):
        store.delete(NAME)
    for bad in ("../x", "a/b", "", ".hidden", "x.new"):
        with pytest.raises(AssertionError):
            store.create(bad, 4096)


def test_small_records(store: Store) -> None:
    assert store.read_small("run.json") is None
    store.write_small("run.json", b"one")
    store.write_small("run.json", b"two")
    assert store.read_small("run.json") == b"two"
    assert not store.exists("run.json")


def test_replace_keeps_what_a_mapping_shows(store: Store, filled: Fill) -> None:
    store.create(NAME, 8192)
    store.write(NAME, 0, filled(8192).memory)
    mapping = store.map_private(NAME, 0, 8192)
    view = mapping.tensor(4096, 4096)
    store.replace(NAME)
    assert not store.is_mapped(NAME)
    store.write(NAME, 0, filled(8192, seed=1).memory)
    assert torch.equal(view, filled(8192).tensor[4096:])
    back = filled(8192)
    store.read(NAME, 0, back.memory)
    assert back.memory == filled(8192, seed=1).memory


def test_reopened_store_finds_its_files(tmp_path: Path, filled: Fill) -> None:
    store = FileStore([tmp_path])
    store.create(NAME, 4096)
    store.write(NAME, 0, filled(4096).memory)
    store.sync(NAME)
    store.close()
    again = FileStore([tmp_path])
    assert again.exists(NAME)
    assert again.bytes_read == 0
    back = filled(4096, seed=1)
    again.read(NAME, 0, back.memory)
    assert back.memory == filled(4096).memory
    assert again.path_of(NAME) == tmp_path / "pages" / NAME


def test_replace_keeps_hard_links(tmp_path: Path, filled: Fill) -> None:
    store = FileStore([tmp_path])
    store.create(NAME, 4096)
    store.write(NAME, 0, filled(4096).memory)
    link = tmp_path / "link"
    os.link(store.path_of(NAME), link)
    store.replace(NAME)
    store.write(NAME, 0, filled(4096, seed=1).memory)
    store.sync(NAME)
    assert link.read_bytes()[4096:] == filled(4096).memory


def test_is_mapped_while_a_tensor_lives(tmp_path: Path) -> None:
    store = FileStore([tmp_path])
    store.create(NAME, 8192)
    mapping = store.map_private(NAME, 0, 8192)
    assert not store.is_mapped(NAME)
    view = mapping.tensor(0, 4096).view(torch.float32)[3:5]
    del mapping
    assert store.is_mapped(NAME)
    array = view.numpy()
    del view
    assert store.is_mapped(NAME)
    del array
    assert not store.is_mapped(NAME)


def test_several_directories_fill_evenly(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    store = FileStore(directories)
    for index in range(6):
        store.create(f"p{index:05d}.weight.0", 4096 * (6 - index))
    held = [sum(f.stat().st_size - 4096 for f in (d / "pages").iterdir()) for d in directories]
    assert sum(held) == 4096 * 21
    assert abs(held[0] - held[1]) <= 2 * 4096
    places = {name: store.path_of(name) for name in store._places}
    again = FileStore(directories)
    assert {name: again.path_of(name) for name in places} == places


def test_a_file_in_two_directories_is_refused(tmp_path: Path) -> None:
    for directory in ("a", "b"):
        FileStore([tmp_path / directory]).create(NAME, 4096)
    with pytest.raises(ConfigError, match="offload_dir"):
        FileStore([tmp_path / "a", tmp_path / "b"])


def test_descriptors_are_bounded(tmp_path: Path, filled: Fill) -> None:
    store = FileStore([tmp_path])
    frame = filled(4096)
    before = len(os.listdir("/proc/self/fd"))
    mappings = []
    for index in range(300):
        store.create(f"p{index:05d}.grad.0", 4096)
        store.write(f"p{index:05d}.grad.0", 0, frame.memory)
        mappings.append(store.map_private(f"p{index:05d}.grad.0", 0, 4096))
    assert len(os.listdir("/proc/self/fd")) - before <= 130
    store.read("p00000.grad.0", 0, frame.memory)
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("position", "what"), [(0, "magic"), (8, "format version"), (40, "header checksum")]
)
def test_changed_header_is_named(tmp_path: Path, position: int, what: str) -> None:
    FileStore([tmp_path]).create(NAME, 4096)
    with open(tmp_path / "pages" / NAME, "r+b") as file:
        file.seek(position)
        file.write(b"\xee")
    with pytest.raises(CorruptPageError, match=f"{what} differs"):
        FileStore([tmp_path]).size(NAME)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "pages" / NAME
    store = FileStore([tmp_path], header_of=lambda name: {"layout": "abc"})
    store.create(NAME, 4096)
    with pytest.raises(CorruptPageError, match=r"layout differs \(expected 'xyz', found 'abc'\)"):
        FileStore([tmp_path], header_of=lambda name: {"layout": "xyz"}).size(NAME)
    os.rename(path, path.with_name("p00001.weight.0"))
    with pytest.raises(CorruptPageError, match="name differs"):
        FileStore([tmp_path], header_of=lambda name: {"layout": "abc"}).size("p00001.weight.0")
    os.rename(path.with_name("p00001.weight.0"), path)
    os.truncate(path, 4096 + 100)
    with pytest.raises(CorruptPageError, match="payload bytes differ"):
        FileStore([tmp_path], header_of=lambda name: {"layout": "abc"}).size(NAME)
    os.truncate(path, 5)
    with pytest.raises(CorruptPageError, match="length differs"):
        FileStore([tmp_path]).size(NAME)


def test_half_made_files_do_not_exist(tmp_path: Path) -> None:
    store = FileStore([tmp_path])
    (tmp_path / "pages" / f"{NAME}.new").write_bytes(b"half")
    assert not FileStore([tmp_path]).exists(f"{NAME}.new")
    store.create(NAME, 4096)
    assert os.listdir(tmp_path / "pages") == [NAME]


def test_short_read_says_how_short(tmp_path: Path, filled: Fill) -> None:
    store = FileStore([tmp_path])
    store.create(NAME, 8192)
    store.size(NAME)
    os.truncate(tmp_path / "pages" / NAME, 8192)
    with pytest.raises(StorageError, match="short read at offset 0: wanted 8192 bytes, got 4096"):
        store.read(NAME, 0, filled(8192).memory)


def test_partial_transfers_are_completed(
    tmp_path: Path, filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore([tmp_path])
    store.create(NAME, 64 * 4096)
    store.size(NAME)
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: read(fd, [v[0][:12288]], at) - 512)
    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: write(fd, [v[0][:8192]], at))
    store.write(NAME, 0, filled(64 * 4096).memory)
    back = filled(64 * 4096, seed=1)
    with pytest.raises(StorageError, match="short read"):  # the last 512 bytes never come
        store.read(NAME, 0, back.memory)
    assert back.memory == filled(64 * 4096).memory


@pytest.mark.skipif(not O_DIRECT, reason="no direct I/O on this platform")
@pytest.mark.parametrize("where", ["open", "first I/O"])
def test_refused_direct_io_falls_back_once(
    tmp_path: Path,
    filled: Fill,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    import fcntl

    real_open, real_read = os.open, os.preadv

    def refuse_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real_open(path, flags, mode)

    def refuse_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real_read(fd, buffers, offset)

    if where == "open":
        monkeypatch.setattr(pagefile.os, "open", refuse_open)
    else:
        monkeypatch.setattr(pagefile.os, "preadv", refuse_read)
    store = FileStore([tmp_path])
    assert store.direct
    with caplog.at_level(logging.WARNING):
        for index in range(3):
            name = f"p{index:05d}.state.1"
            store.create(name, 4096)
            store.write(name, 0, filled(4096, seed=index).memory)
            store.sync(name)
            back = filled(4096, seed=9)
            store.read(name, 0, back.memory)
            assert back.memory == filled(4096, seed=index).memory
    assert not store.direct
    assert [record.message.count("O_DIRECT") for record in caplog.records] == [1]


def test_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = FileStore([tmp_path])
    with pytest.raises(StorageError, match="max_disk_gb") as caught:
        store.create(NAME, 4096)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "pages" / NAME)
    assert not store.exists(NAME)
    assert os.listdir(tmp_path / "pages") == []
    with pytest.raises(StorageError):
        MemoryStore(capacity_bytes=4096).create(NAME, 8192)


def test_faults(filled: Fill) -> None:
    faults = [
        Fault(op="create", kind="enospc", name_pattern="*.grad.*"),
        Fault(op="read", kind="eio", nth=2),
        Fault(op="read", kind="short", nth=3),
        Fault(op="read", kind="flip", nth=4),
        Fault(op="write", kind="flip", nth=2),
        Fault(op="write", kind="short", nth=3),
        Fault(op="sync", kind="slow", nth=0, delay_s=0.0),
    ]
    store = FaultyStore(MemoryStore(), faults)
    with pytest.raises(StorageError) as caught:
        store.create("p00000.grad.0", 4096)
    assert caught.value.errno == errno.ENOSPC
    store.create("p00000.grad.0", 4096)
    store.create(NAME, 8192)
    good, back = filled(8192), filled(8192, seed=1)
    store.write(NAME, 0, good.memory)
    store.read(NAME, 0, back.memory)
    assert back.memory == good.memory
    with pytest.raises(StorageError) as caught:
        store.read(NAME, 0, back.memory)
    assert caught.value.errno == errno.EIO
    with pytest.raises(StorageError, match="short read"):
        store.read(NAME, 0, back.memory)
    store.read(NAME, 0, back.memory)
    assert (back.tensor != good.tensor).sum() == 1
    store.write(NAME, 0, good.memory)
    store.read(NAME, 0, back.memory)
    assert (back.tensor != good.tensor).sum() == 1
    assert good.memory == filled(8192).memory
    with pytest.raises(StorageError, match="short write"):
        store.write(NAME, 0, filled(8192, seed=2).memory)
    store.read(NAME, 0, back.memory)
    assert back.memory[:4096] == filled(8192, seed=2).memory[:4096]
    assert back.memory[4096:] != filled(8192, seed=2).memory[4096:]
    store.sync(NAME)


def test_throttle_counts_seconds(filled: Fill) -> None:
    slept: list[float] = []
    store = ThrottledStore(MemoryStore(), 4096.0, 8192.0, sleep=slept.append)
    store.create(NAME, 8192)
    store.write(NAME, 0, filled(8192).memory)
    store.read(NAME, 0, filled(8192).memory)
    assert slept == [1.0, 2.0]
    assert store.bytes_read == 8192


def test_file_systems(tmp_path: Path) -> None:
    assert kind("/proc/self") == "proc"
    assert kind(tmp_path / "not" / "there") == kind(tmp_path) != "unknown"
    assert not is_memory("/proc")
    assert isinstance(supports_direct_io(tmp_path), bool)
    assert os.listdir(tmp_path) == []
    if os.path.isdir("/dev/shm") and kind("/dev/shm") == "tmpfs":
        assert is_memory("/dev/shm")
