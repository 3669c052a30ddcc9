"""`bench io` measures drives by the code that moves pages; `bench machine` keeps rates."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mt_lightning.cli import main
from mt_lightning.commands.bench.fio import Fio, Run
from mt_lightning.errors import StorageError
from mt_lightning.planning.profile import MachineProfile
from mt_lightning.tiers.io import IOQueue

SMALL = ["--size", "0.01"]


def test_every_way_is_measured_in_every_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "a", tmp_path / "b: c"]
    for place in places:
        place.mkdir()
    asked: list[tuple[int, int, int]] = []

    def run(self: Fio, reads: list[Path], writes: list[Path], nbytes: int) -> Run:
        assert all(path.stat().st_size >= nbytes for path in (*reads, *writes))
        asked.append((len(reads), len(writes), nbytes))
        return Run(1e9 * len(reads), 1e9 * len(writes), 0.5, nbytes)

    monkeypatch.setattr("shutil.which", lambda _: "fio")
    monkeypatch.setattr(Fio, "run", run)
    command = ["bench", "io", *map(str, places), *SMALL, "--rounds", "1", "--json"]
    assert main(command) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["directory"] for result in results[::4]] == [*map(str, places), "all"]
    ways = ["read", "read, no sums", "write", "both at once"]
    assert [result["operation"] for result in results[:4]] == ways
    for result in results:
        assert (result["read_bytes_per_s"] > 0) == (result["operation"] != "write")
        assert (result["write_bytes_per_s"] > 0) == (
            result["operation"] in ("write", "both at once")
        )
        moved = result["read_bytes_per_s"] + result["write_bytes_per_s"]
        assert result["of_fio"] == moved / result["fio_bytes_per_s"]
    # Of both directories at once, fio moves as many files as we do.
    assert {(reads, writes) for reads, writes, _ in asked} == {
        (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 2)
    }  # fmt: skip
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_fio_moves_the_same_files_when_it_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "io", str(tmp_path), *SMALL, "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("read", "write", "both at once", "of fio"))
    assert ("fio was not run" in shown) == (shutil.which("fio") is None)


def test_a_fio_that_fails_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fio"
    fake.write_text("#!/bin/sh\necho no engine >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "page").write_bytes(b"\0" * 8192)
    assert Fio.find(tmp_path / "page", True, 4) is None
    with pytest.raises(StorageError, match="no engine"):
        Fio("libaio", True, 4).run([tmp_path / "page"], [], 4096)


def test_nothing_is_left_behind_by_an_interrupted_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(IOQueue, "sync", interrupted)
    assert main(["bench", "io", str(tmp_path), *SMALL]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--size", "0"], "--size"),
        (["--size", "nan"], "--size"),
        (["--rounds", "0"], "--rounds"),
        (["--size", "1e9"], "Lower --size"),
        (["nowhere"], "nowhere is no directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "io", *wrong]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_rates_of_a_machine_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept" / "machine.json"
    command = ["bench", "machine", str(tmp_path), "--profile", str(path), *SMALL, "--params", "1e5"]
    assert main([*command, "--json"]) == 0
    profile = MachineProfile.load(path)
    assert json.loads(capsys.readouterr().out)["measured_at"] == profile.measured_at
    assert profile.flops_per_s.keys() == {"float32", "bfloat16"}
    assert profile.update_params_per_s.keys() >= {"raw", "lossless", "R1"}
    assert profile.memory_bytes_per_s is not None
    in_memory = profile.drive(tmp_path) is None
    if not in_memory:
        other = profile.drives[0].__class__(**{**vars(profile.drives[0]), "device": "0:0"})
        profile.with_drives((other,)).save(path)
        assert main(command) == 0
        assert {drive.device for drive in MachineProfile.load(path).drives} == {
            "0:0",
            profile.drives[0].device,
        }


def test_a_damaged_profile_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text("{")
    command = ["bench", "machine", str(tmp_path), "--profile", str(path), *SMALL, "--params", "1e5"]
    assert main(command) == 0
    assert MachineProfile.load(path).num_threads >= 1
