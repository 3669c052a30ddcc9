"""Linked checkpoints and the run they came from, each of them attacked while the other goes on."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import mt_lightning as mt
import mt_lightning.plugins.linked as linked_module
import mt_lightning.resume.checkpoints as checkpoints_module
from mt_lightning.tiers.checkpoint_files import FOLDER
from mt_lightning.tiers.commit import CommitLog

from .runs import assert_same_tree, end_of, fit, linked, paged

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended",
    "ignore:Be aware that when using `ckpt_path`",
)


def committed_step(directory: Path) -> int:
    record = CommitLog([directory]).latest()
    assert record is not None
    return record.step


class Broken(Callback):
    """Fails in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start"])
def test_a_checkpoint_that_took_the_place_of_later_commits_is_what_the_run_goes_on_from(
    tmp_path: Path, hook: str, durability: str
) -> None:
    root = tmp_path / "pages"
    saves = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    fit(tmp_path, paged(root, durability=durability), io=linked(), saves=saves)
    path = tmp_path / "ck" / "step=3.ckpt"
    expected = end_of(fit(tmp_path, "auto"))
    gc.collect()
    again: dict[str, Any] = {"durability": durability, "on_existing": "resume"}
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, paged(root, **again), io=linked(), ckpt_path=path, callbacks=[Broken(hook)])
    gc.collect()
    assert_same_tree(end_of(fit(tmp_path, paged(root, **again))), expected)


SAVES = {
    "every_n_train_steps": 1,
    "save_top_k": 2,
    "monitor": "step",
    "mode": "max",
    "save_last": True,
    "filename": "{step}",
}
"""The last two and a third by the name `last`; each save deletes an older one."""
MOMENTS = {
    "there is no room for what replaces the pages": (checkpoints_module, "check_room"),
    "the folder": (linked_module, "make_folder"),
    "the links": (linked_module, "link_files"),
    "the rest": (linked_module, "_write_rest"),
    "the manifest": (linked_module, "write_file"),
    "the old one is marked": (linked_module, "doom"),
}


class FullAt(Callback):
    """Lets the disk be full while the checkpoints of one step are saved."""

    def __init__(self, full: set[str]) -> None:
        self.full = full

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.full.add("now")


def all_load(folder: Path) -> list[int]:
    """Load every checkpoint, which verifies it, and return the steps that they are of."""
    return sorted(
        mt.PagedCheckpointIO().load_checkpoint(path)["global_step"]
        for path in folder.glob("*.ckpt")
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_disk_that_is_full_while_one_is_saved_is_waited_for(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder, name = MOMENTS[moment]
    inner: Callable[..., Any] = getattr(holder, name)
    full: set[str] = set()
    there = str(tmp_path / "ck" / "not yet written.ckpt")

    def no_room(*args: Any, **kwargs: Any) -> Any:
        if full:
            full.clear()  # somebody makes room
            raise mt.StorageError(errno.ENOSPC, "no room for 4096 bytes", there)
        return inner(*args, **kwargs)

    monkeypatch.setattr(holder, name, no_room)
    root = tmp_path / "pages"
    callbacks = [FullAt(full), ModelCheckpoint(tmp_path / "ck", **SAVES)]
    settings: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True}
    strategy = paged(root, durability="checkpoint", disk_full_timeout_s=60)
    found = end_of(fit(tmp_path, strategy, io=linked(), **settings))
    assert_same_tree(found, end_of(fit(tmp_path, "auto")))
    assert (
        "the run pauses: saving a checkpoint needs room: no room for 4096 bytes"
        in caplog.text.lower()
    )
    assert len(all_load(tmp_path / "ck")) == 3


@pytest.mark.parametrize(
    ("moment", "save"),
    [
        pytest.param(moment, save, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, moment in enumerate(MOMENTS)
        for j, save in enumerate(("first", "second"))
    ],
)
def test_a_disk_that_is_full_while_one_is_saved_costs_that_one_alone(
    tmp_path: Path, moment: str, save: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, name = MOMENTS[moment]
    inner: Callable[..., Any] = getattr(holder, name)
    full: set[str] = set()
    num_calls = 0

    def no_room(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if full:
            num_calls += 1
            if num_calls == {"first": 1, "second": 2}[save]:
                raise mt.StorageError(errno.ENOSPC, "no room for 4096 bytes", "there")
        return inner(*args, **kwargs)

    monkeypatch.setattr(holder, name, no_room)
    root = tmp_path / "pages"
    strategy = paged(root, durability="checkpoint", disk_full_timeout_s=0)
    callbacks = [FullAt(full), ModelCheckpoint(tmp_path / "ck", **SAVES)]
    settings: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True}
    with pytest.raises(mt.StorageError, match="no room for 4096 bytes"):
        fit(tmp_path, strategy, io=linked(), **settings)
    strategy._close()
    full.clear()
    assert committed_step(root) == 4
    found = all_load(tmp_path / "ck")
    assert found
    assert set(found) <= {2, 3, 4}

    again = paged(root, durability="checkpoint", on_existing="resume")
    assert_same_tree(
        end_of(fit(tmp_path, again, io=linked(), saves=SAVES)),
        end_of(fit(tmp_path, "auto")),
    )
    again._close()
    files = list((tmp_path / "ck").glob("*.ckpt"))
    assert all_load(tmp_path / "ck")[-3:] == [5, 6, 6]
    assert len(list((root / FOLDER).iterdir())) == len(files)
