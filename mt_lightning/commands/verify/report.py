"""What `megatrain verify` found at one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_lightning.commands.finding import Finding, Status


@dataclass(frozen=True)
class Leftover:
    """A file of a run, or a folder of a linked checkpoint, that nothing needs.

    Attributes:
        path: Where it is.
        nbytes: Its bytes.
        why: What it was.
    """

    path: Path
    nbytes: int
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"path": str(self.path), "bytes": self.nbytes, "why": self.why}


@dataclass
class Report:
    """What was found.

    Attributes:
        kind: "run", "checkpoint" or "safetensors".
        paths: What was looked at.
        findings: The lines of the table.
        facts: Numbers, for `--json`.
        leftovers: Files that may be removed.
        pruned: Files that were removed.
    """

    kind: str
    paths: list[Path]
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)
    pruned: list[Leftover] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether something is lost."""
        return any(finding.status is Status.BAD for finding in self.findings)

    def say(self, name: str, value: str) -> None:
        """Add a line on something that is well."""
        self.findings.append(Finding(name, Status.OK, value))

    def warn(self, name: str, value: str, remedy: str) -> None:
        """Add a line on something that is worth knowing, but nothing is lost."""
        self.findings.append(Finding(name, Status.WARN, value, remedy))

    def blame(self, name: str, value: str, remedy: str) -> None:
        """Add a line on damage."""
        self.findings.append(Finding(name, Status.BAD, value, remedy))

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "kind": self.kind,
            "paths": [str(path) for path in self.paths],
            "damaged": self.damaged,
            "facts": self.facts,
            "findings": [finding.as_dict() for finding in self.findings],
            "leftovers": [leftover.as_dict() for leftover in self.leftovers],
            "pruned": [leftover.as_dict() for leftover in self.pruned],
        }


def told(error: OSError) -> str:
    """Return where and what an error of a file is."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int, what: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
