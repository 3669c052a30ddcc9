"""Reads by kvikio give what was written, and where it cannot be had one sentence says why."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mt_lightning as mt
from mt_lightning.errors import StorageError
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers import direct
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.direct import DirectReads, driver_refusal, open_direct
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.store import FileStore

from ..graphs.nets import Net, assert_same, fit, smallest_gb

NBYTES = BLOCK_BYTES + 4096


class Future:
    def __init__(self, done: int) -> None:
        self._done = done

    def get(self) -> int:
        return self._done


class StandIn(ModuleType):
    """Has of kvikio what is called here, and its faults on demand."""

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.__version__ = "26.10.00"
        self.defaults = ModuleType("kvikio.defaults")
        self.settings: dict[str, object] = {}
        self.defaults.set = self.settings.update  # type: ignore[attr-defined]
        self.open_files = 0
        self.error: Exception | None = None
        self.wrong = 0
        module = self

        class CuFile:
            def __init__(self, path: str, flags: str = "r") -> None:
                assert flags == "r"
                self._fd = os.open(path, os.O_RDONLY)
                module.open_files += 1

            def close(self) -> None:
                os.close(self._fd)
                module.open_files -= 1

            def pread(self, buf: memoryview, size: int, file_offset: int = 0) -> Future:
                if module.error is not None:
                    raise module.error
                done = os.preadv(self._fd, [buf[:size]], file_offset)
                if module.wrong:
                    module.wrong -= 1
                    buf[0] ^= 1
                return Future(done)

        self.CuFile = CuFile


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", module.defaults)
    monkeypatch.setattr(direct, "driver_refusal", lambda: None)
    return module


def filled(root: Path, reads: DirectReads) -> tuple[FileStore, list[int]]:
    """Make a payload and return its store and the checksums of its blocks."""
    store, frame = FileStore([root], direct=reads), Frame(NBYTES)
    frame.tensor.copy_(torch.arange(NBYTES) % 251)
    store.create("a", NBYTES)
    queue = IOQueue(store)
    sums = queue.write("a", [(0, frame.memory[:NBYTES])]).wait().sums
    queue.close()
    return store, sums


def read_back(store: FileStore, sums: list[int]) -> torch.Tensor:
    frame, queue = Frame(NBYTES), IOQueue(store)
    try:
        queue.read("a", [(0, frame.memory[:NBYTES])], sums).wait()
    finally:
        queue.close()
    return frame.tensor[:NBYTES]


def check_reads(module: Any, root: Path) -> None:
    """Let a module read what was written."""
    reads = DirectReads(module)
    store, sums = filled(root, reads)
    assert torch.equal(read_back(store, sums), (torch.arange(NBYTES) % 251).byte())
    assert reads.num_reads == 2
    store.close()


def test_every_block_is_read_and_compared(kvikio: StandIn, tmp_path: Path) -> None:
    check_reads(kvikio, tmp_path)
    assert kvikio.open_files == 0, "closed with the store"


def test_a_replaced_file_is_opened_anew(kvikio: StandIn, tmp_path: Path) -> None:
    reads = DirectReads(kvikio)
    store, sums = filled(tmp_path, reads)
    read_back(store, sums)
    store.replace("a")
    assert kvikio.open_files == 0
    with pytest.raises(StorageError, match="checksum"):
        read_back(store, sums)
    store.close()


def test_wrong_bytes_are_noticed(kvikio: StandIn, tmp_path: Path) -> None:
    store, sums = filled(tmp_path, DirectReads(kvikio))
    kvikio.wrong = 4
    with pytest.raises(StorageError, match="instead of"):
        read_back(store, sums)
    kvikio.wrong = 1
    assert torch.equal(read_back(store, sums), (torch.arange(NBYTES) % 251).byte())
    store.close()


def test_what_it_cannot_read_is_read_without_it_from_then_on(
    kvikio: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reads = DirectReads(kvikio)
    store, sums = filled(tmp_path, reads)
    kvikio.error = RuntimeError("KvikIO failure: no such device")
    expected = (torch.arange(NBYTES) % 251).byte()
    assert torch.equal(read_back(store, sums), expected)
    kvikio.error = None
    assert torch.equal(read_back(store, sums), expected)
    store.close()
    assert reads.num_reads == 0
    assert [r.getMessage().count("no such device") for r in caplog.records] == [1]


@pytest.mark.parametrize("asked", [True, "auto", False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_who_asks_gets_it_where_it_can_be_had(kvikio: StandIn, asked: Any, device: str) -> None:
    wanted = asked is True or (asked == "auto" and device == "cuda")
    assert (open_direct(asked, device) is not None) == wanted
    assert bool(kvikio.settings) == wanted


@pytest.mark.parametrize("asked", [True, "auto"])
@pytest.mark.parametrize("missing", ["module", "driver", "settings"])
def test_what_is_missing_is_named(
    asked: Any,
    missing: str,
    kvikio: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if missing == "module":
        monkeypatch.setitem(sys.modules, "kvikio", None)
    elif missing == "driver":
        monkeypatch.setattr(direct, "driver_refusal", lambda: "it needs a CUDA driver (none)")
    else:
        monkeypatch.delattr(kvikio.defaults, "set")
    with caplog.at_level(logging.INFO, logger="mt_lightning"):
        assert open_direct(asked, "cuda") is None
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if asked is True else logging.INFO)
    named = {"module": "mt-lightning[gds]", "driver": "CUDA driver", "settings": "cannot be set up"}
    assert named[missing] in record.getMessage()


def test_training_reads_by_it_and_changes_no_bit(kvikio: StandIn, tmp_path: Path) -> None:
    plain, paged = Net(), Net()
    fit(plain, tmp_path / "plain")
    budget_gb = smallest_gb(Net, tmp_path / "tried", durability="step")
    strategy = mt.MegaTrainStrategy(
        offload_dir=tmp_path / "pages",
        max_ram_gb=budget_gb,
        durability="step",
        direct_storage=True,
    )
    fit(paged, tmp_path / "paged", strategy)
    assert_same(paged, plain)
    assert strategy.engine is not None
    store: Any = strategy.engine.machine.store
    assert store.inner._direct.num_reads > 0


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")
def test_kvikio_itself_reads_what_was_written(tmp_path: Path) -> None:
    reason = driver_refusal()
    if reason is not None:
        pytest.skip(reason)
    reads = open_direct(True, "cpu")
    assert reads is not None
    check_reads(reads._kvikio, tmp_path)
