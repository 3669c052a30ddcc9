"""Linked checkpoints on a real drive that fills: waited for, or refused; nothing is lost."""

from __future__ import annotations

import gc
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import mt_lightning as mt
from mt_lightning.cli import main

from ..faults.test_directory import fill, mount, pretend_space, small_drive  # noqa: F401
from .runs import assert_same_tree, end_of, fit, linked, paged

FULL_FROM = 3
DURABILITY = ["step", pytest.param("checkpoint", marks=pytest.mark.slow)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended",
    "ignore:Be aware that when using `ckpt_path`",
)


class Fills(Callback):
    """Takes all space of a drive when a step has ended, before its checkpoint is saved."""

    def __init__(self, drive: Path) -> None:
        self._drive = drive
        self.filled = threading.Event()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FULL_FROM:
            fill(self._drive)
            self.filled.set()


def keeps(drive: Path) -> ModelCheckpoint:
    """Save after every step and keep the last two, on the drive itself."""
    saves: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": 2, "monitor": "step"}
    return ModelCheckpoint(drive / "ck", mode="max", filename="{step}", **saves)


def _room_for(drive: Path, caplog: pytest.LogCaptureFixture, fills: Fills) -> None:
    if not fills.filled.wait(60):
        return  # the run ended earlier, and its own test says why
    deadline = time.monotonic() + 60
    while "the disk is full" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    (drive / "other").unlink()


@pytest.mark.parametrize("durability", DURABILITY)
def test_saving_goes_on_when_there_is_space(
    tmp_path: Path,
    mount: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    durability: str,
) -> None:
    drive = small_drive(mount, tmp_path, 8)
    pretend_space(monkeypatch, 1 << 40)
    fills = Fills(drive)
    thread = threading.Thread(target=_room_for, args=(drive, caplog, fills))
    thread.start()
    strategy = paged(drive / "pages", durability=durability)
    with caplog.at_level(logging.WARNING):
        trainer = fit(
            drive, strategy, io=linked(), callbacks=[fills, keeps(drive)], enable_checkpointing=True
        )
    thread.join()
    assert "there is space again" in caplog.text
    assert_same_tree(end_of(trainer), end_of(fit(tmp_path, "auto")))
    strategy._close()
    _assert_kept(drive, tmp_path)


@pytest.mark.parametrize("durability", DURABILITY)
def test_the_deadline_leaves_the_commit_and_the_checkpoints_whole(
    tmp_path: Path,
    mount: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
) -> None:
    drive = small_drive(mount, tmp_path, 8)
    pretend_space(monkeypatch, 1 << 40)
    strategy = paged(drive / "pages", durability=durability, disk_full_timeout_s=0.3)
    with pytest.raises(mt.StorageError, match="disk_full_timeout_s"):
        fit(
            drive,
            strategy,
            io=linked(),
            callbacks=[Fills(drive), keeps(drive)],
            enable_checkpointing=True,
        )
    strategy._close()
    gc.collect()
    (drive / "other").unlink()
    _assert_kept(drive, tmp_path)
    again = paged(drive / "pages", durability=durability, on_existing="resume")
    trainer = fit(drive, again, io=linked(), callbacks=[keeps(drive)], enable_checkpointing=True)
    assert_same_tree(end_of(trainer), end_of(fit(tmp_path, "auto")))


def _assert_kept(drive: Path, root: Path) -> None:
    """Every checkpoint is whole and trains on to the end of plain training."""
    paths = sorted((drive / "ck").glob("*.ckpt"))
    assert paths
    assert main(["verify", str(drive / "pages"), *map(str, paths)]) == 0
    elsewhere = paged(root / "elsewhere")
    trainer = fit(root, elsewhere, ckpt_path=paths[-1])
    assert_same_tree(end_of(trainer), end_of(fit(root, "auto")))
    elsewhere._close()
