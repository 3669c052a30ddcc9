"""A machine profile comes back as it was saved; damaged and foreign ones are refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.planning.here import machine_here
from mt_lightning.planning.profile import (
    DriveRates,
    Host,
    MachineProfile,
    device_of,
    profile_path,
)

HERE = Host.here()


def _drive(directory: Path, **changes: Any) -> DriveRates:
    rates = DriveRates(
        directory=str(directory),
        device=device_of(directory),
        file_system="ext4",
        direct=True,
        read_bytes_per_s=3e9,
        write_bytes_per_s=2e9,
        mixed_read_bytes_per_s=1.5e9,
        mixed_write_bytes_per_s=1.25e9,
        read_cpu_s_per_gib=0.1,
        write_cpu_s_per_gib=0.2,
    )
    return replace(rates, **changes)


@pytest.fixture
def profile(tmp_path: Path) -> MachineProfile:
    return MachineProfile(
        measured_at="2026-11-30T12:00:00+00:00",
        num_threads=2,
        memory_bytes_per_s=2e10,
        flops_per_s={"float32": 1e11, "bfloat16": 3e11},
        update_params_per_s={"raw": 5e8, "dynamic": 9e8},
        drives=(_drive(tmp_path),),
    )


def test_it_comes_back_as_it_was_saved(profile: MachineProfile, tmp_path: Path) -> None:
    path = profile.save(tmp_path / "deep" / "er" / "machine.json")
    assert MachineProfile.load(path) == profile
    assert [each.name for each in path.parent.iterdir()] == ["machine.json"]


def test_its_place_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: MachineProfile
) -> None:
    monkeypatch.delenv("MT_LIGHTNING_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert profile_path() == tmp_path / "home" / ".cache" / "mt_lightning" / "machine.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert profile_path() == tmp_path / "xdg" / "mt_lightning" / "machine.json"
    monkeypatch.setenv("MT_LIGHTNING_CACHE", str(tmp_path / "own"))
    assert profile.save() == tmp_path / "own" / "machine.json"
    assert MachineProfile.load() == profile


def test_a_drive_is_found_by_its_device(profile: MachineProfile, tmp_path: Path) -> None:
    assert profile.drive(tmp_path / "not" / "there" / "yet") == profile.drives[0]
    assert replace(profile, drives=(_drive(tmp_path, device="0:0"),)).drive(tmp_path) is None


def test_new_rates_replace_those_of_the_same_drive_only(
    profile: MachineProfile, tmp_path: Path
) -> None:
    other = _drive(tmp_path, device="0:0")
    both = profile.with_drives((other,))
    assert both.drives == (*profile.drives, other)
    faster = _drive(tmp_path, device="0:0", read_bytes_per_s=9e9)
    assert both.with_drives((faster,)).drives == (*profile.drives, faster)


def test_a_profile_of_another_machine_is_refused_unless_asked_for(
    profile: MachineProfile, tmp_path: Path
) -> None:
    foreign = replace(profile, host=replace(HERE, num_processors=HERE.num_processors + 1))
    path = foreign.save(tmp_path / "machine.json")
    with pytest.raises(ConfigError, match=r"another machine .*megatrain bench machine"):
        MachineProfile.load(path)
    assert MachineProfile.load(path, of_any_machine=True) == foreign


def test_a_missing_profile_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no machine profile.*megatrain bench machine"):
        MachineProfile.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format",), "another"),
        (("version",), 3),
        (("num_threads",), 0),
        (("num_threads",), True),
        (("num_threads",), None),
        (("memory_bytes_per_s",), -1.0),
        (("memory_bytes_per_s",), "fast"),
        (("flops_per_s",), None),
        (("flops_per_s", "float32"), float("nan")),
        (("update_params_per_s", "raw"), float("inf")),
        (("host", "processor"), ""),
        (("host",), []),
        (("host", "surprise"), 1),
        (("drives",), {}),
        (("drives", 0), None),
        (("drives", 0, "device"), 7),
        (("drives", 0, "direct"), 1),
        (("drives", 0, "read_bytes_per_s"), 0),
        (("surprise",), 1),
    ],
)
def test_a_field_that_is_wrong_is_refused(
    where: tuple[Any, ...], value: Any, profile: MachineProfile, tmp_path: Path
) -> None:
    path = profile.save(tmp_path / "machine.json")
    data = json.loads(path.read_text())
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="not a machine profile that can be read"):
        MachineProfile.load(path)


def test_bytes_that_are_no_profile_are_refused(profile: MachineProfile, tmp_path: Path) -> None:
    path = profile.save(tmp_path / "machine.json")
    whole = path.read_bytes()
    texts = [whole[:length] for length in range(0, len(whole) - 2, 97)]
    texts += [b"[" * 100_000, b"null", b"\xff\xfe", os.urandom(64), b" " * (1 << 21)]
    for text in texts:
        path.write_bytes(text)
        with pytest.raises(ConfigError, match="not a machine profile that can be read"):
            MachineProfile.load(path)


def test_a_profile_that_cannot_be_written_is_an_error(
    profile: MachineProfile, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the machine profile"):
        profile.save(tmp_path / "file" / "machine.json")


def test_a_drive_that_was_not_measured_is_named_with_the_command(
    profile: MachineProfile, tmp_path: Path
) -> None:
    whole = replace(profile, memory_bytes_per_s=1e9, flops_per_s={"float32": 1e9})
    with pytest.raises(ConfigError, match=r"no rates of /proc;.*megatrain bench machine /proc\."):
        machine_here(whole, ["/proc"])
    with pytest.raises(ConfigError, match=r"nothing of matrix products.*megatrain bench machine"):
        machine_here(replace(whole, flops_per_s={}), [tmp_path])
