"""Whatever happened to a linked checkpoint is found when it is loaded, and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mt_lightning as mt

from .runs import Net, fit, linked, manifest_of, paged, saved

Damage = Callable[[Path], None]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    # A fresh file: the damaged one may be linked elsewhere.
    path.unlink()
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()[:-4096]
    path.unlink()
    path.write_bytes(data)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("linked"))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original.parent, tmp_path / "copy")
    return tmp_path / "copy" / original.name


DATA: dict[str, tuple[str, Damage, type[Exception], str]] = {
    "flipped": ("p00002.weight.0", lambda p: flip(p, 4096 + 5000), mt.CorruptPageError, "offset 0"),
    "flipped state": ("p00002.state.1", lambda p: flip(p, 4096 + 9), mt.CorruptPageError, "offset"),
    "flipped header": ("p00001.state.1", lambda p: flip(p, 20), mt.CorruptPageError, "header"),
    "truncated": ("p00001.weight.0", cut, mt.CorruptPageError, "bytes instead of"),
    "missing": ("p00001.weight.0", Path.unlink, mt.StorageError, "cannot be opened"),
    "pipe": ("p00001.weight.0", make_pipe, mt.StorageError, "is no file"),
    "link": ("p00001.weight.0", make_link, mt.StorageError, "cannot be opened"),
    "rest flipped": ("run.pt", lambda p: flip(p, 300), mt.CorruptPageError, "checksum"),
    "rest truncated": ("run.pt", cut, mt.CorruptPageError, "bytes instead of"),
    "rest missing": ("run.pt", Path.unlink, mt.StorageError, "cannot be opened"),
    "state flipped": ("run_state", lambda p: flip(p, 999), mt.CorruptPageError, "state of the run"),
    "buffers missing": ("buffers", Path.unlink, mt.StorageError, "cannot be opened"),
}


@pytest.mark.parametrize("kind", DATA)
def test_damaged_data_are_named(checkpoint: Path, kind: str) -> None:
    name, damage, error, words = DATA[kind]
    folder = manifest_of(checkpoint).folders[0]
    damage(folder / name)
    with pytest.raises(error, match=words) as caught:
        mt.PagedCheckpointIO().load_checkpoint(checkpoint)
    assert str(folder / name) in str(caught.value)


def test_a_damaged_checkpoint_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    flip(manifest_of(checkpoint).folders[0] / "p00002.weight.0", 4096 + 77)
    module = Net()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(mt.CorruptPageError, match=r"p00002\.weight"):
        fit(tmp_path, paged(tmp_path / "pages"), module=module, ckpt_path=checkpoint)
    assert all(value.equal(start[name]) for name, value in module.state_dict().items())


def test_a_missing_folder_is_named(checkpoint: Path) -> None:
    manifest = manifest_of(checkpoint)
    shutil.rmtree(manifest.folders[0])
    folder = json.loads(checkpoint.read_text())["content"]
    folder["directories"] = [[relative, "/none"] for relative, _ in folder["directories"]]
    checkpoint.write_text(seal(folder))
    with pytest.raises(mt.StorageError, match=manifest.checkpoint_id):
        mt.PagedCheckpointIO().load_checkpoint(checkpoint)


def seal(content: Any) -> str:
    """Return a manifest of whatever content with a right checksum."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    value = f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"
    kind = {"format": "megatrain-linked-checkpoint", "version": 1}
    return json.dumps({**kind, "sum": value, "content": content})


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_manifest_with_other_bytes_is_refused(original: Path, data: st.DataObject) -> None:
    good = original.read_bytes()
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(1, max(1, len(bad) - 1)))
        match data.draw(st.sampled_from(["set", "cut", "drop", "insert"])):
            case "set":
                bad[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "cut":
                del bad[at:]
            case "drop":
                del bad[at : at + 1]
            case _:
                bad.insert(at, data.draw(st.integers(0, 255)))
    path = original.parent / "fuzzed.ckpt"
    path.write_bytes(bad)
    try:
        same = json.loads(bad) == json.loads(good)
    except ValueError:
        same = False
    if same:
        assert mt.PagedCheckpointIO().load_checkpoint(path)["global_step"] == 6
    else:
        with pytest.raises(mt.ConfigError, match=r"fuzzed\.ckpt"):
            mt.PagedCheckpointIO().load_checkpoint(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.sampled_from(["", "..", "/etc/passwd", "p00001.weight.0", "\0", "\ud800", "0" * 16])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_a_sealed_manifest_of_other_content_is_refused(original: Path, data: st.DataObject) -> None:
    """A checksum shows damage, not intent: every value is checked as well."""
    content = json.loads(original.read_text())["content"]
    node: Any = content
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(list(keys)))
        deeper = isinstance(node[key], dict | list) and len(node[key]) > 0
        if not deeper or data.draw(st.integers(0, 3)) == 0:
            break
        node = node[key]
    node[key] = data.draw(JSON)
    path = original.parent / "sealed.ckpt"
    path.write_text(seal(content))
    io = mt.PagedCheckpointIO()
    try:
        found = io.load_checkpoint(path)
    except (mt.ConfigError, mt.StorageError):
        return
    assert found["global_step"] == 6


@pytest.mark.parametrize("name", ["../p00001.weight.0", "/etc/passwd", "a/b", "..", ".hidden", ""])
def test_names_that_lead_elsewhere_are_refused(original: Path, name: str) -> None:
    for what in ("id", "file", "rest"):
        content = json.loads(original.read_text())["content"]
        if what == "id":
            content["id"] = name
        elif what == "rest":
            content["rest"][0] = name
        else:
            content["files"][name] = content["files"].pop("p00001.weight.0")
            for tensor in content["tensors"]:
                tensor[0] = name if tensor[0] == "p00001.weight.0" else tensor[0]
        path = original.parent / "elsewhere.ckpt"
        path.write_text(seal(content))
        with pytest.raises(mt.ConfigError, match="not a plain name"):
            mt.PagedCheckpointIO().load_checkpoint(path)
        with pytest.raises(mt.ConfigError):
            manifest_of(path)


def test_removing_a_foreign_manifest_deletes_nothing_else(original: Path, tmp_path: Path) -> None:
    precious = tmp_path / "checkpoints" / "precious"
    precious.mkdir(parents=True)
    (precious / "thesis.txt").write_text("years of work")
    content = json.loads(original.read_text())["content"]
    content["id"], content["home"] = "precious", str(tmp_path / "some.ckpt")
    content["directories"] = [[".", str(tmp_path)]]
    path = tmp_path / "some.ckpt"
    path.write_text(seal(content))
    linked().remove_checkpoint(path)
    assert not path.exists()
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_newer_version_is_named(original: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.ckpt"
    path.write_text(original.read_text().replace('"version":1', '"version":2', 1))
    with pytest.raises(mt.ConfigError, match="version 2"):
        mt.PagedCheckpointIO().load_checkpoint(path)
