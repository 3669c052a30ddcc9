"""`megatrain export --optimizer`: checkpoints go from one form of state to another, on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mt_lightning import MegaTrainStrategy
from mt_lightning.cli import main

from ..compression.net import assert_same_training, fit, make_net


def adamw(net: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def paged(compression: Any) -> MegaTrainStrategy:
    return MegaTrainStrategy(max_ram_gb=1, optimizer_compression=compression)


def save(path: Path, strategy: Any, *, max_steps: int = 8) -> None:
    fit(make_net(adamw), strategy, max_steps=max_steps).save_checkpoint(path)


@pytest.mark.parametrize("form", ["dynamic", "R0"])
def test_plain_state_can_be_packed_and_trained_on(tmp_path: Path, form: str) -> None:
    plain, packed = tmp_path / "plain.ckpt", tmp_path / "packed.ckpt"
    save(plain, "auto")
    assert main(["export", str(plain), str(packed), "--optimizer", form]) == 0
    fit(make_net(adamw), paged(form), max_steps=12, ckpt_path=packed)
    before, after = (torch.load(path, weights_only=True) for path in (plain, packed))
    for name, value in before["state_dict"].items():
        assert torch.equal(after["state_dict"][name], value)
    steps = [state["step"] for state in after["optimizer_states"][0]["state"].values()]
    assert all(step == 8 for step in steps)


def test_packed_state_can_be_unpacked_for_plain_lightning(tmp_path: Path) -> None:
    packed, plain = tmp_path / "packed.ckpt", tmp_path / "plain.ckpt"
    save(packed, paged(True))
    assert main(["export", str(packed), str(plain), "--optimizer", "adamw"]) == 0
    # Without the state of the run, which plain Lightning has no use for: random numbers go with it.
    kept = torch.load(plain, weights_only=True)
    torch.save({k: v for k, v in kept.items() if k != "megatrain_run"}, plain)
    raw, again = make_net(adamw), make_net(adamw)
    fit(raw, "auto", max_steps=12, ckpt_path=plain)
    fit(again, paged(False), max_steps=12, ckpt_path=plain)
    assert_same_training(raw, again)


@pytest.mark.parametrize("form", ["R1", "m8v8"])
def test_packing_what_was_unpacked_gives_the_same_bytes(tmp_path: Path, form: str) -> None:
    paths = [tmp_path / f"{name}.ckpt" for name in ("first", "plain", "second")]
    save(paths[0], paged(form))
    assert main(["export", str(paths[0]), str(paths[1]), "--optimizer", "adamw"]) == 0
    assert main(["export", str(paths[1]), str(paths[2]), "--optimizer", form]) == 0
    first, second = (
        torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        for path in (paths[0], paths[2])
    )
    for index, entries in first.items():
        assert torch.equal(entries["packed"], second[index]["packed"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("form", "use one of"),
        ("exists", "exists"),
        ("no state", "no optimizer state"),
        ("not a checkpoint", "cannot be loaded"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    tmp_path: Path, what: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    form = "int8" if what == "form" else "R1"
    if what == "not a checkpoint":
        source.write_bytes(b"not a checkpoint")
    elif what == "no state":
        trainer = fit(make_net(adamw), "auto", max_steps=1)
        trainer.save_checkpoint(source, weights_only=True)
    else:
        save(source, "auto", max_steps=1)
    if what == "exists":
        target.write_bytes(b"precious")
    assert main(["export", str(source), str(target), "--optimizer", form]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    if what == "exists":
        assert target.read_bytes() == b"precious"
    else:
        assert not target.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"a.ckpt", "b.ckpt"}
