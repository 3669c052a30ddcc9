"""`megatrain doctor`: findings, remedies, and nothing left behind."""

from __future__ import annotations

import io
import json
import resource
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mt_lightning import cli
from mt_lightning.commands import doctor, drive
from mt_lightning.commands.doctor import diagnose
from mt_lightning.commands.drive import diagnose_drive, measure_bytes_per_s
from mt_lightning.commands.finding import Finding, Status, findings_table

GIB = 1024**3


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "_PROBE_BYTES", 8 * 1024**2)
    monkeypatch.setattr(drive, "_PROBE_PART_BYTES", 4 * 1024**2)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    named = {finding.name: finding for finding in findings}
    assert len(named) == len(findings)
    return named


def test_json_and_table(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(workplace.iterdir())
    code = cli.main(["doctor", "--json", "--dir", str(workplace / "not" / "yet")])
    findings = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in findings]
    assert names[:3] == ["memory", "memory cgroup", "huge pages"]
    assert {"drive", "room", "direct I/O", "speed"} <= set(names)
    assert {"page-lock limit", "open files limit", "device", "versions"} <= set(names)
    assert code == (1 if any(finding["status"] == "bad" for finding in findings) else 0)
    for finding in findings:
        assert bool(finding["remedy"]) == (finding["status"] != "ok")
        assert "\n" not in finding["remedy"]
    assert sorted(workplace.iterdir()) == before
    cli.main(["doctor"])
    assert all(name in capsys.readouterr().out for name in ("megatrain doctor",))


def test_speed_is_measured_and_cleaned_up(workplace: Path) -> None:
    read_per_s, written_per_s = measure_bytes_per_s(workplace)
    assert read_per_s > 0
    assert written_per_s > 0
    assert [path for path in workplace.iterdir() if "doctor" in path.name] == []


@pytest.mark.parametrize(
    ("kind", "is_memory", "status"),
    [
        ("ext4", False, Status.OK),
        ("tmpfs", True, Status.BAD),
        ("nfs4", False, Status.WARN),
        ("fuse.sshfs", False, Status.WARN),
        ("overlay", False, Status.WARN),
    ],
)
def test_kinds_of_drive(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_memory: bool, status: Status
) -> None:
    monkeypatch.setattr(drive, "kind", lambda path: kind)
    monkeypatch.setattr(drive, "is_memory", lambda path: is_memory)
    finding = by_name(list(diagnose_drive(workplace)))["drive"]
    assert finding.status is status
    assert kind in finding.value


def test_a_poor_drive(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "supports_direct_io", lambda path: False)
    monkeypatch.setattr(drive, "free_bytes", lambda path: GIB)
    monkeypatch.setattr(drive, "measure_bytes_per_s", lambda path: (1e8, 1e9))
    findings = by_name(list(diagnose_drive(workplace)))
    assert findings["room"].status is Status.WARN
    assert findings["direct I/O"].status is Status.WARN
    assert findings["speed"].status is Status.WARN
    assert "reads 0.10 GB/s" in findings["speed"].value


def test_a_directory_of_somebody_else(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive.os, "access", lambda path, mode: False)
    findings = by_name(list(diagnose_drive(workplace)))
    assert findings["write access"].status is Status.BAD
    assert "speed" not in findings


def test_a_small_machine(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge_pages = workplace / "enabled"
    huge_pages.write_text("always madvise [never]\n")
    monkeypatch.setattr(doctor, "_HUGE_PAGES_PATH", huge_pages)
    monkeypatch.setattr(doctor, "cgroup_free_bytes", lambda: GIB)
    monkeypatch.setattr(doctor, "ram_limit_bytes", lambda given: GIB)
    limits = {resource.RLIMIT_MEMLOCK: (65536, 65536), resource.RLIMIT_NOFILE: (256, 256)}
    monkeypatch.setattr(doctor.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(drive, "measure_bytes_per_s", lambda path: (2e9, 2e9))
    monkeypatch.setattr(doctor, "_DEMO_PACKAGES", ("no_such_package",))
    findings = by_name(diagnose(workplace))
    bad = {name: finding.status for name, finding in findings.items() if finding.remedy}
    assert bad == {
        "memory": Status.WARN,
        "memory cgroup": Status.WARN,
        "huge pages": Status.WARN,
        "open files limit": Status.BAD,
        "demo model": Status.WARN,
    }


def test_another_system(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    findings = diagnose(workplace)
    assert (findings[0].name, findings[0].status) == ("system", Status.BAD)
    assert "Linux" in findings[0].remedy


def test_the_table_shows_the_remedy() -> None:
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(findings_table([Finding("drive", Status.BAD, "tmpfs", "Choose a drive.")]))
    text = console.export_text()
    assert "bad" in text
    assert "Choose a drive." in text
