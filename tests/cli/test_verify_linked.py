"""Linked checkpoints on the command line: verified whole, listed with their run, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

import mt_lightning as mt
from mt_lightning.cli import main
from mt_lightning.plugins.linked import RUN_STATE
from mt_lightning.tiers import checkpoint_files
from mt_lightning.tiers.checkpoint_files import FOLDER, folders_in
from mt_lightning.tiers.manifest_reader import read_manifest

from ..checkpoints.runs import Net, assert_same_tree, fit, linked, paged


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a linked checkpoint and the same as a standard file; copied by the tests."""
    root = tmp_path_factory.mktemp("trained")
    trainer = fit(root, paged(root / "pages"), io=linked())
    trainer.save_checkpoint(root / "some.ckpt")
    trainer.strategy.checkpoint_io = mt.PagedCheckpointIO()
    trainer.save_checkpoint(root / "standard.ckpt")
    trainer.strategy._close()  # pyright: ignore
    # Nothing may be found where it was written: the copies are whole by themselves.
    return root.rename(root.with_name("moved"))


@pytest.fixture
def root(trained: Path, workplace: Path) -> Path:
    shutil.copytree(trained, workplace / "work")
    return workplace / "work"


def verify(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", "--json", *map(str, words)])
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    return code, report


def rows(report: dict[str, Any], status: str) -> list[str]:
    found = [row for row in report["findings"] if row["status"] == status]
    return [f"{row['name']}: {row['value']} {row['remedy']}" for row in found]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_whole_one_is_read_to_the_last_byte(root: Path, capsys: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    code, report = verify(capsys, root / "some.ckpt")
    assert (code, rows(report, "bad"), rows(report, "warn")) == (0, [], [])
    _, standard = verify(capsys, root / "standard.ckpt")
    for fact in ("step", "tensors", "tensor_bytes", "tensors_not_finite"):
        assert report["facts"][fact] == standard["facts"][fact], fact
    manifest = read_manifest(root / "some.ckpt")
    assert report["facts"]["page_files"] == len(manifest.files)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


DAMAGES = ["flipped", "truncated", "missing", "rest", "state", "manifest", "not one", "folder"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named(kind: str, root: Path, capsys: Any) -> None:
    path = root / "some.ckpt"
    manifest = read_manifest(path)
    pages = [manifest.path_of(name) for name in sorted(manifest.files)]
    named = pages[0]
    if kind == "flipped":
        for page in pages[:2]:
            flip(page, 4096 + 1000)
    elif kind == "truncated":
        named.write_bytes(named.read_bytes()[:-4096])
    elif kind == "missing":
        named.unlink()
    elif kind == "rest":
        flip(named := manifest.rest_path, 300)
    elif kind == "state":
        flip(named := manifest.folders[0] / "run_state", 300)
    elif kind == "manifest":
        flip(named := path, 500)
    elif kind == "not one":
        path.write_text('{"what": "else"}')
        named = path
    else:
        shutil.rmtree(named := manifest.folders[0])
    code, report = verify(capsys, path)
    bad = rows(report, "bad")
    assert code == 1
    assert any(named.name in row for row in bad)
    assert len(bad) == (2 if kind == "flipped" else 1)


def test_those_of_a_run_are_listed_with_their_manifests(
    root: Path, trained: Path, capsys: Any
) -> None:
    (folder,) = folders_in(root / "pages")
    code, report = verify(capsys, root / "pages")
    assert (code, rows(report, "warn"), report["leftovers"]) == (0, [], [])
    (listed,) = report["facts"]["linked_checkpoints"]
    assert listed["id"] == folder.name
    assert listed["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert listed["manifest"] == str(root / "some.ckpt")
    # One that was not written down is one of which nobody knows.
    (folder / checkpoint_files.NAMED_BY).unlink()
    _, report = verify(capsys, root / "pages")
    assert report["facts"]["linked_checkpoints"][0]["manifest"] is None
    assert rows(report, "warn") == []


def test_pruning_keeps_what_may_be_needed(root: Path, trained: Path, capsys: Any) -> None:
    """What the next run would delete goes; a folder whose manifest went elsewhere stays."""
    pages = root / "pages"
    (whole,) = folders_in(pages)
    torn = checkpoint_files.make_folder(pages, "step-9-torn", root / "none.ckpt")
    (torn / "p00000.weight.0").write_bytes(b"half")
    (pages / FOLDER / "step-9-empty").mkdir()
    # Killed behind the manifest: the marker is still there, and the checkpoint is whole.
    checkpoint_files.doom([whole], root / "some.ckpt")
    code, report = verify(capsys, pages)
    assert code == 0
    leftovers = {Path(each["path"]).name for each in report["leftovers"]}
    assert leftovers == {"step-9-torn", "step-9-empty"}
    assert torn.exists()
    code, report = verify(capsys, pages, "--prune")
    assert {Path(each["path"]).name for each in report["pruned"]} == leftovers
    assert folders_in(pages) == [whole]
    checkpoint_files.finish([whole])
    (root / "elsewhere").mkdir()
    away = (root / "some.ckpt").rename(root / "elsewhere" / "some.ckpt")
    code, report = verify(capsys, pages, "--prune")
    assert (code, report["pruned"]) == (0, [])
    assert any("no longer at" in row for row in rows(report, "warn"))
    manifest = away.read_bytes()
    away.unlink()
    (root / "some.ckpt").write_bytes(manifest)
    assert verify(capsys, root / "some.ckpt")[0] == 0


def test_a_directory_with_nothing_but_checkpoints_is_listed(root: Path, capsys: Any) -> None:
    pages = root / "pages"
    shutil.rmtree(pages / "pages")
    for path in pages.glob("commit.*"):
        path.unlink()
    code, report = verify(capsys, pages)
    assert code == 0
    assert report["facts"]["checkpoints"] == 1


def test_it_is_exported_as_the_standard_file_is(root: Path, capsys: Any) -> None:
    for name in ("some", "standard"):
        assert main(["export", str(root / f"{name}.ckpt"), str(root / f"{name}.safetensors")]) == 0
        target = str(root / f"{name}-bf16.ckpt")
        assert main(["export", str(root / f"{name}.ckpt"), target, "--optimizer", "R1"]) == 0
    assert_same_tree(load_file(root / "some.safetensors"), load_file(root / "standard.safetensors"))
    found, expected = (
        torch.load(root / f"{name}-bf16.ckpt", weights_only=True) for name in ("some", "standard")
    )
    assert_same_tree(found["state_dict"], expected["state_dict"])
    assert_same_tree(found["optimizer_states"], expected["optimizer_states"])
    # The new file is a standard one, and does not need the pages.
    plain = root / "plain.ckpt"
    assert main(["export", str(root / "some.ckpt"), str(plain), "--optimizer", "adamw"]) == 0
    shutil.rmtree(root / "pages")
    found, expected = (
        torch.load(path, weights_only=True) for path in (plain, root / "standard.ckpt")
    )
    assert_same_tree(found["state_dict"], expected["state_dict"])
    for one, other in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert_same_tree(one["state"], other["state"])
    # The state of a run belongs to the optimizer state that it was saved with.
    assert set(found) == set(expected) - {RUN_STATE}


def test_a_damaged_one_is_not_exported(root: Path, capsys: Any) -> None:
    manifest = read_manifest(root / "some.ckpt")
    path = manifest.path_of(min(manifest.files))
    flip(path, 4096 + 1000)
    capsys.readouterr()
    assert main(["export", str(root / "some.ckpt"), str(root / "out.safetensors")]) == 2
    assert path.name in "".join(capsys.readouterr().err.split())
    assert not (root / "out.safetensors").exists()


def test_coded_state_is_verified_and_exported(workplace: Path, capsys: Any) -> None:
    saves = {"every_n_train_steps": 3, "save_top_k": -1}
    for name, io in (("linked", linked()), ("standard", mt.PagedCheckpointIO())):
        strategy = paged(workplace / name / "pages", optimizer_compression="lossless")
        trainer = fit(workplace / name, strategy, module=Net(), io=io, saves=saves, max_steps=4)
        assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
        trainer.strategy._close()  # pyright: ignore
        (path,) = (workplace / name / "ck").glob("*.ckpt")
        assert verify(capsys, path)[0] == 0
        assert main(["export", str(path), f"{name}.ckpt", "--optimizer", "adamw"]) == 0
    found, expected = (
        torch.load(f"{name}.ckpt", weights_only=True)["optimizer_states"]
        for name in ("linked", "standard")
    )
    assert_same_tree(found, expected)
