"""`megatrain verify`: what is whole is said to be, what is damaged is named, prune is harmless."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from mt_lightning import CompressedAdamW, MegaTrainStrategy
from mt_lightning.cli import main
from mt_lightning.commands.verify import report as report_room
from mt_lightning.tiers.lock import DirectoryLock


class Net(LightningModule):
    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
            for _ in range(3)
        )
        self.register_buffer("seen", torch.zeros(2))
        self._make = optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make(self.parameters())


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def fit(net: Net, dirs: list[Path], *, max_steps: int, **settings: Any) -> Trainer:
    strategy = MegaTrainStrategy(offload_dir=[str(path) for path in dirs], max_ram_gb=1, **settings)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(0))
    trainer.fit(net, DataLoader(batches, batch_size=2))  # pyright: ignore
    return trainer


def end(trainer: Trainer) -> None:
    """Give the directories back, as the end of the process does."""
    trainer.strategy._close()  # pyright: ignore


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two directories and a checkpoint; copied by the tests and never changed."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = fit(Net(adamw), [folder / "a", folder / "b"], max_steps=3, durability="step")
    trainer.save_checkpoint(folder / "last.ckpt")
    end(trainer)
    return folder


@pytest.fixture
def run(trained: Path, workplace: Path) -> list[Path]:
    for name in ("a", "b"):
        shutil.copytree(trained / name, workplace / name)
    return [workplace / "a", workplace / "b"]


class Verified:
    """Exit code and JSON of one call."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        found = json.loads(text)
        assert found["damaged"] == (code == 1)
        self.reports = found["reports"]
        (self.report, *_) = self.reports

    def rows(self, status: str) -> list[str]:
        return [
            f"{row['name']}: {row['value']} {row['remedy']}"
            for row in self.report["findings"]
            if row["status"] == status
        ]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., Verified]:
    def call(*words: Any) -> Verified:
        capsys.readouterr()
        code = main(["verify", "--json", *map(str, words)])
        return Verified(code, capsys.readouterr().out)

    return call


def committed(run: list[Path], plane: str) -> Path:
    """Return the file of a page that the newest commit names."""
    from mt_lightning.engine.committed import open_committed

    held = open_committed(run)
    key = next(key for key in held.record.slots if key.endswith(plane))
    return held.files.pages[f"{key}.{held.record.slots[key]}"]


def other_slot(run: list[Path], path: Path) -> Path:
    name = f"{path.name[:-1]}{1 - int(path.name[-1])}"
    (found,) = [each / "pages" / name for each in run if (each / "pages" / name).exists()]
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_whole_run_is_said_to_be_whole(
    run: list[Path], verify: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for each in run for path in each.rglob("*")}
    found = verify(*run)
    assert found.code == 0
    assert found.rows("warn") == []
    facts = found.report["facts"]
    assert facts["step"] == 3
    assert facts["weights_verified_bytes"] == facts["weight_bytes"]
    assert facts["optimizer_state_verified_bytes"] == 2 * facts["weight_bytes"]
    assert main(["verify", *map(str, run)]) == 0
    assert "checksums right" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for each in run for path in each.rglob("*")} == before


@pytest.mark.parametrize(
    ("optimizer", "compression"),
    [
        (adamw, "lossless"),
        (adamw, True),
        (lambda params: torch.optim.Adafactor(params, lr=1e-2), False),
        (lambda params: torch.optim.SGD(params, lr=1e-2), False),
        (lambda params: CompressedAdamW(params, lr=1e-2), False),
    ],
    ids=["lossless", "packed", "adafactor", "sgd", "compressed"],
)
def test_every_form_of_state_is_verified_to_the_last_byte(
    optimizer: Any, compression: Any, workplace: Path, verify: Any
) -> None:
    trainer = fit(Net(optimizer), [workplace / "r"], max_steps=3, optimizer_compression=compression)
    end(trainer)
    found = verify("r")
    assert (found.code, found.rows("warn")) == (0, [])
    states = sorted((workplace / "r" / "pages").glob("*.state.*"))
    if states:
        state = committed([workplace / "r"], ".state")
        flip(state, 4096 + 17)
        assert verify("r").code == 1


DAMAGES = ["truncated", "longer", "flipped bit", "garbage", "empty", "missing"]


@pytest.mark.parametrize("plane", [".weight", ".state"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_page_is_named(kind: str, plane: str, run: list[Path], verify: Any) -> None:
    path = committed(run, plane)
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[:-4096])
    elif kind == "longer":
        path.write_bytes(data + bytes(4096))
    elif kind == "flipped bit":
        flip(path, 4096 + 1000)
    elif kind == "garbage":
        path.write_bytes(b"garbage!" * (len(data) // 8))
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    found = verify(*run)
    assert found.code == 1
    (row,) = found.rows("bad")
    assert path.name in row
    assert "on_existing='overwrite'" in row
    if kind == "flipped bit":
        assert "offset 0 of the payload (byte 4096 of the file)" in row


def test_damage_outside_of_what_a_commit_names_is_none(run: list[Path], verify: Any) -> None:
    flip(other_slot(run, committed(run, ".weight")), 5000)
    assert verify(*run).code == 0


def newest(run: list[Path]) -> Path:
    from mt_lightning.tiers.commit import CommitRecord

    records = list(run[0].glob("commit.*"))
    return max(records, key=lambda path: CommitRecord.from_bytes(path.read_bytes()).sequence)


@pytest.mark.parametrize("kind", ["torn", "garbage", "empty", "missing"])
@pytest.mark.parametrize("both", [False, True])
def test_records_that_cannot_be_read(kind: str, both: bool, run: list[Path], verify: Any) -> None:
    last = newest(run)
    for path in list(run[0].glob("commit.*")) if both else [last]:
        data = bytearray(path.read_bytes())
        if kind == "torn":
            data[200:300] = bytes(100)
            path.write_bytes(data)
        elif kind == "garbage":
            path.write_bytes(b"\x01garbage" * 500)
        elif kind == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
    if both:
        found = verify(*run)
        assert found.code == 1
        assert any("commit" in row for row in found.rows("bad"))
        assert found.report["leftovers"] == []
    else:
        # The record before it stands for the run: it names the same step, which then was not
        # marked as finished yet.
        found = verify(*run)
        assert (found.code, found.report["facts"]["step"]) == (0, 3)
        assert any(last.name in row for row in found.rows("warn")) == (kind in ("torn", "garbage"))


@pytest.mark.parametrize("kind", ["layout", "kept"])
@pytest.mark.parametrize("how", ["garbage", "missing"])
def test_damaged_small_files_are_named(kind: str, how: str, run: list[Path], verify: Any) -> None:
    paths = list(run[0].glob(f"{kind}-*"))
    assert paths
    for path in paths:
        if how == "garbage":
            path.write_text('{"p00000.state": 3, "')
        else:
            path.unlink()
    found = verify(*run)
    assert found.code == 1
    assert all(any(path.name in row for row in found.rows("bad")) for path in paths)
    assert verify(*run, "--prune").report["pruned"] == []


def test_a_missing_directory_is_asked_for(run: list[Path], verify: Any) -> None:
    found = verify(run[0])
    assert found.code == 1
    assert all("all directories of the run" in row for row in found.rows("bad"))
    found = verify(run[1])
    assert found.code == 1
    assert any("missing from the list" in row for row in found.rows("bad"))


def litter(run: list[Path]) -> set[str]:
    pages = run[0] / "pages"
    made = [
        pages / "p00001.weight.0.new",
        pages / "p00001.grad.0",
        pages / "p00099.weight.1",
        run[0] / "layout-0123456789abcdef.json",
        run[0] / "kept-0123456789abcdef",
        run[0] / "kept-0123456789abcdef.new",
        run[1] / ".write-4711",
    ]
    for path in made:
        path.write_bytes(b"leftover")
    return {str(path) for path in made}


def test_prune_removes_leftovers_and_the_run_goes_on(
    run: list[Path], workplace: Path, verify: Any
) -> None:
    made = litter(run)
    (run[0] / "notes.txt").write_text("mine")
    (run[0] / "pages" / "mine").write_text("mine")
    found = verify(*run)
    assert found.code == 0
    assert {each["path"] for each in found.report["leftovers"]} == made
    found = verify(*run, "--prune")
    assert found.code == 0
    assert {each["path"] for each in found.report["pruned"]} == made
    assert sum(each["bytes"] for each in found.report["pruned"]) == 8 * len(made)
    assert not any(Path(path).exists() for path in made)
    assert (run[0] / "notes.txt").exists()
    assert verify(*run, "--prune").report["pruned"] == []
    (run[0] / "pages" / "mine").unlink()  # a run refuses what is not its own
    resumed, whole = Net(adamw), Net(adamw)
    end(fit(resumed, run, max_steps=6, on_existing="resume"))
    end(fit(whole, [workplace / "whole"], max_steps=6))
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_run_that_went_on_is_pruned_of_nothing_it_needs(
    run: list[Path], workplace: Path, verify: Any
) -> None:
    end(fit(Net(adamw), run, max_steps=4, on_existing="resume"))
    verify(*run, "--prune")
    end(fit(Net(adamw), run, max_steps=5, on_existing="resume"))
    assert verify(*run).code == 0


def test_linked_checkpoints_are_counted_and_kept(run: list[Path], verify: Any) -> None:
    for each in run:
        folder = each / "checkpoints" / "one"
        folder.mkdir(parents=True)
        source = next((each / "pages").iterdir())
        (folder / source.name).hardlink_to(source)
    (run[0] / "kept-0123456789abcdef").write_bytes(b"may be named by a manifest")
    found = verify(*run, "--prune")
    assert found.code == 0
    assert found.report["facts"]["checkpoints"] == 1
    assert found.report["pruned"] == []


def test_a_run_in_use_is_listed_but_neither_verified_nor_pruned(
    run: list[Path], verify: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = litter(run)
    locks = [DirectoryLock(path) for path in run]
    for lock in locks:
        lock.acquire()
    found = verify(*run)
    assert found.code == 0
    assert any("in use" in row for row in found.rows("warn"))
    assert main(["verify", *map(str, run), "--prune"]) == 2
    assert "--prune removes nothing" in " ".join(capsys.readouterr().err.split())
    assert all(Path(path).exists() for path in made)
    for lock in locks:
        lock.release()


def test_nothing_is_pruned_while_something_is_damaged(run: list[Path], verify: Any) -> None:
    made = litter(run)
    flip(committed(run, ".weight"), 5000)
    found = verify(*run, "--prune")
    assert found.code == 1
    assert found.report["pruned"] == []
    assert all(Path(path).exists() for path in made)


def test_a_checkpoint_is_verified(trained: Path, workplace: Path, verify: Any) -> None:
    shutil.copy(trained / "last.ckpt", "a.ckpt")
    found = verify("a.ckpt")
    assert (found.code, found.rows("warn"), found.report["facts"]["step"]) == (0, [], 3)
    checkpoint = torch.load("a.ckpt", weights_only=True)
    weight = checkpoint["state_dict"]["layers.0.linear1.weight"]
    raw = weight.numpy().tobytes()
    at = Path("a.ckpt").read_bytes().index(raw)
    flip(Path("a.ckpt"), at + 100)
    found = verify("a.ckpt")
    assert found.code == 1
    assert "CRC" in found.rows("bad")[0]
    Path("b.ckpt").write_bytes(Path("a.ckpt").read_bytes()[:-1000])
    assert verify("b.ckpt").code == 1
    Path("c.ckpt").write_bytes(b"no checkpoint")
    assert verify("c.ckpt").code == 1
    Path("d.ckpt").write_text('{"linked": "checkpoint"}')
    found = verify("d.ckpt")
    assert found.code == 1
    assert "is no checkpoint" in found.rows("bad")[0]
    weight[0, 0] = float("nan")
    torch.save(checkpoint, "e.ckpt")
    found = verify("e.ckpt")
    assert found.code == 0
    assert found.report["facts"]["tensors_not_finite"] == ["state_dict.layers.0.linear1.weight"]


def test_safetensors_are_verified(workplace: Path, verify: Any) -> None:
    folder = workplace / "model"
    folder.mkdir()
    first, second = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file({"a": torch.ones(3)}, first)
    save_file({"b": torch.full((2,), float("inf"))}, second)
    index = {"metadata": {"total_size": 20}, "weight_map": {"a": first.name, "b": second.name}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    found = verify("model", first)
    assert found.code == 0
    assert found.report["facts"]["tensors_not_finite"] == ["b"]
    for broken in (
        "{",
        "[]",
        json.dumps({"weight_map": {"a": first.name}}),
        json.dumps({**index, "metadata": {"total_size": 21}}),
        json.dumps({"weight_map": {"a": first.name, "b": "gone"}}),
    ):
        path.write_text(broken)
        assert verify("model").code == 1
    path.write_text(json.dumps(index))
    second.write_bytes(second.read_bytes()[:-4])
    found = verify("model")
    assert found.code == 1
    assert any(second.name in row for row in found.rows("bad"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "does not exist"),
        (["empty"], "holds neither a run"),
        (["a", "b", "copy"], "lies in both"),
        (["a", "other", "b"], "Name the directories of one run at a time"),
        (["last.ckpt", "--prune"], "--prune is for runs"),
    ],
)
def test_bad_arguments_exit_with_2(
    words: list[str],
    message: str,
    run: list[Path],
    trained: Path,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workplace / "empty").mkdir()
    shutil.copytree("b", "copy")
    shutil.copytree("a", "other")
    shutil.copy(trained / "last.ckpt", "last.ckpt")
    assert main(["verify", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_sizes_and_counts_read_well() -> None:
    assert [report_room.size(n) for n in (0, 1023, 1024, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
    ]
    assert report_room.count(1, "file") == "1 file"
    assert report_room.count(0, "file") == "0 files"
