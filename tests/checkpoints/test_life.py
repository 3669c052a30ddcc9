"""From the first link to the last: checkpoints stay as they are, and go when they are removed."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import mt_lightning as mt
from mt_lightning.plugins import linked as linked_module
from mt_lightning.tiers import checkpoint_files
from mt_lightning.tiers.checkpoint_files import FOLDER, MARKER, folders_in
from mt_lightning.tiers.origins import Seal
from mt_lightning.tiers.store import FileStore
from mt_lightning.tiers.verify import verify

from .runs import Net, assert_same_tree, end_of, fit, linked, manifest_of, paged, saved

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_training_replaces_what_is_linked(tmp_path: Path) -> None:
    seen: dict[Path, dict[str, bytes]] = {}

    class Watching(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3:
                self.trainer.save_checkpoint(tmp_path / "three.ckpt")
                (folder,) = folders_in(tmp_path / "pages")
                assert all(os.stat(f).st_nlink > 1 for f in folder.glob("p*"))
                seen[folder] = bytes_of(folder)

    trainer = fit(tmp_path, paged(tmp_path / "pages"), module=Watching(), io=linked(), max_steps=7)
    ((folder, before),) = seen.items()
    after = bytes_of(folder)
    assert {name: after[name] for name in before} == before
    verify(manifest_of(tmp_path / "three.ckpt"))
    # Two steps later nothing is shared any more but what is never trained.
    trained = [f for f in folder.glob("p*") if f.name.endswith((".state.0", ".state.1"))]
    assert [f.name for f in trained if f.stat().st_nlink > 1] == []
    three = fit(tmp_path, "auto", max_steps=3)
    found = mt.PagedCheckpointIO().load_checkpoint(tmp_path / "three.ckpt")
    assert_same_tree(dict(found["state_dict"]), end_of(three)["weights"])
    assert trainer.global_step == 7


def test_the_disk_stays_bounded_over_many_saves(tmp_path: Path) -> None:
    saves = {"every_n_train_steps": 1, "save_top_k": 2, "monitor": "step", "mode": "max"}
    trainer = fit(
        tmp_path,
        paged(tmp_path / "pages"),
        io=linked(),
        saves={**saves, "save_last": True},
        max_steps=9,
    )
    files = sorted(file.name for file in (tmp_path / "ck").iterdir())
    assert files == ["epoch=0-step=8.ckpt", "epoch=0-step=9.ckpt", "last.ckpt"]
    ids = {manifest_of(tmp_path / "ck" / file).checkpoint_id for file in files}
    assert {folder.name for folder in folders_in(tmp_path / "pages")} == ids
    assert not list((tmp_path / "pages" / FOLDER).glob(f"*/{MARKER}"))
    last, best = (manifest_of(tmp_path / "ck" / name) for name in (files[2], files[1]))
    for name in last.files:
        assert last.path_of(name).samefile(best.path_of(name)), "the same bytes are kept once"
    for file in files:
        trainer.strategy.remove_checkpoint(tmp_path / "ck" / file)
    assert folders_in(tmp_path / "pages") == []
    assert all(f.stat().st_nlink == 1 for f in (tmp_path / "pages" / "pages").iterdir())


def test_saving_again_replaces_and_a_refused_save_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    before = manifest_of(path)
    trainer = fit(tmp_path, paged(tmp_path / "b"), io=linked(), max_steps=2)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(mt.StorageError, match="Free some space"):
            trainer.save_checkpoint(path)
    assert manifest_of(path) == before
    verify(manifest_of(path))
    assert folders_in(tmp_path / "b") == []
    assert not (before.folders[0] / MARKER).exists()
    trainer.save_checkpoint(path)
    assert not before.folders[0].exists()
    assert mt.PagedCheckpointIO().load_checkpoint(path)["global_step"] == 2
    mt.PagedCheckpointIO().save_checkpoint({"global_step": 1}, path)
    assert folders_in(tmp_path / "b") == []


def test_a_copy_and_a_link_of_a_manifest_do_not_own_the_data(tmp_path: Path) -> None:
    io, path = linked(), saved(tmp_path)
    shutil.copy(path, tmp_path / "copy.ckpt")
    (tmp_path / "link.ckpt").symlink_to(path)
    for name in ("copy.ckpt", "link.ckpt"):
        assert io.load_checkpoint(tmp_path / name)["global_step"] == 6
        io.remove_checkpoint(tmp_path / name)
        verify(manifest_of(path))


def test_what_an_interrupted_checkpoint_left_goes_with_the_next_run(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = manifest_of(path)
    pages = tmp_path / "pages"
    # Killed before the manifest: a folder with a marker that points nowhere.
    torn = checkpoint_files.make_folder(pages, "step-9-torn", tmp_path / "none.ckpt")
    (torn / "p00000.weight.0").write_bytes(b"half")
    (pages / FOLDER / "step-9-empty").mkdir()
    # Killed after it: the marker is still there.
    checkpoint_files.doom(whole.folders, path)
    fit(tmp_path, paged(pages, on_existing="overwrite"), max_steps=1)
    assert folders_in(pages) == list(whole.folders)
    assert not (whole.folders[0] / MARKER).exists()
    verify(manifest_of(path))
    # Killed while it was removed.
    checkpoint_files.doom(whole.folders, path)
    path.unlink()
    gc.collect()
    fit(tmp_path, paged(pages, on_existing="overwrite"), max_steps=1)
    assert folders_in(pages) == []


def test_it_can_be_moved_with_its_directory(tmp_path: Path) -> None:
    path = saved(tmp_path / "here")
    expected = {
        k: v.clone() for k, v in mt.PagedCheckpointIO().load_checkpoint(path)["state_dict"].items()
    }
    (tmp_path / "here").rename(tmp_path / "there")
    path = tmp_path / "there" / path.name
    found = mt.PagedCheckpointIO().load_checkpoint(path)
    assert_same_tree(dict(found["state_dict"]), expected)
    # The directory alone goes to another place: who resumes in it is told nothing more.
    (tmp_path / "there" / "pages").rename(tmp_path / "elsewhere")
    with pytest.raises(mt.StorageError, match="offload_dir together with the manifest"):
        mt.PagedCheckpointIO().load_checkpoint(path)
    strategy = paged(tmp_path / "elsewhere", on_existing="overwrite")
    goes_on = fit(tmp_path, strategy, ckpt_path=path, max_steps=8)
    assert_same_tree(end_of(goes_on), end_of(fit(tmp_path, "auto", max_steps=8)))


def test_without_hard_links_files_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(checkpoint_files.os, "link", refuse)
    with caplog.at_level(logging.INFO, logger="mt_lightning"):
        path = saved(tmp_path)
    assert sum("are copied" in record.message for record in caplog.records) == 1
    verify(manifest_of(path))
    assert mt.PagedCheckpointIO().load_checkpoint(path)["global_step"] == 6


def test_several_directories(tmp_path: Path) -> None:
    path = saved(tmp_path, paged([tmp_path / "a", tmp_path / "b"]))
    manifest = manifest_of(path)
    assert len(manifest.directories) == 2
    verify(manifest)
    linked().remove_checkpoint(path)
    assert folders_in(tmp_path / "a") == folders_in(tmp_path / "b") == []


def test_a_directory_of_its_own_stays_while_checkpoints_live_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mt_lightning"):
        path = saved(tmp_path, mt.MegaTrainStrategy(max_ram_gb=0.1))
    (directory,) = (tmp_path / "megatrain").iterdir()
    assert "is kept: linked checkpoints live in it" in caplog.text
    assert not list(directory.glob("pages/*"))
    assert not list(directory.glob("commit.*"))
    verify(manifest_of(path))


def test_max_disk_gb_counts_what_checkpoints_keep(tmp_path: Path) -> None:
    strategy = paged(tmp_path / "pages")
    saved(tmp_path, strategy)
    assert strategy.engine is None
    pages = sum(f.stat().st_size for f in (tmp_path / "pages" / "pages").iterdir())
    most = 1.7 * pages / 2**30
    saves = {"every_n_train_steps": 1, "save_top_k": -1}
    with pytest.raises(mt.BudgetError, match="max_disk_gb"):
        fit(tmp_path, paged(tmp_path / "b", max_disk_gb=most), io=linked(), saves=saves)
    assert len(folders_in(tmp_path / "b")) == 1, "the first one fits, the second is refused"
    with pytest.raises(mt.BudgetError, match="max_disk_gb"):
        fit(
            tmp_path,
            paged(tmp_path / "pages", max_disk_gb=1.2 * most / 1.7, on_existing="overwrite"),
        )


@pytest.mark.parametrize("moment", ["link_files", "_write_rest", "write_file", "finish"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, moment: str) -> None:
    path = saved(tmp_path)
    gc.collect()
    child = os.fork()
    if not child:
        try:
            setattr(linked_module, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            held = folders_in(tmp_path / "pages")[0]
            store = FileStore([tmp_path / "pages"])
            name = next(file.name for file in held.glob("*.weight.*"))
            nbytes = store.size(name)
            mapping = store.map_private(name, 0, nbytes)
            sums = manifest_of(path).files[name].sums
            mapping.views.seal = Seal(((0, nbytes),), sums)
            tensor = mapping.tensor(0, 4096)
            linked().save_checkpoint({"global_step": 7, "state_dict": {"a": tensor}}, path)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    fit(tmp_path, paged(tmp_path / "pages", on_existing="overwrite"), max_steps=1)
    step = 7 if moment == "finish" else 6
    assert linked().load_checkpoint(path)["global_step"] == step
    assert [f.name for f in folders_in(tmp_path / "pages")] == [manifest_of(path).checkpoint_id]
    assert not list((tmp_path / "pages" / FOLDER).glob(f"*/{MARKER}"))
