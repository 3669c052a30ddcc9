"""One line of `megatrain doctor` or `megatrain verify`, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from rich.table import Table
from rich.text import Text


class Status(str, Enum):
    """How a finding is: `OK`, `WARN` (works, but slower or tight), `BAD` (will not work)."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.BAD: "bold red"}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: What was checked.
        status: How it is.
        value: What was found.
        remedy: One line on what to do; empty if nothing.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the finding as JSON values."""
        return {**asdict(self), "status": self.status.value}


def findings_table(findings: Sequence[Finding], title: str = "megatrain doctor") -> Table:
    """Show findings, a remedy below each that needs one."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    table.add_column("check")
    table.add_column("")
    table.add_column("found", overflow="fold")
    for finding in findings:
        found = Text(finding.value)
        if finding.remedy:
            found.append(f"\n{finding.remedy}", style=_STYLES[finding.status])
        status = Text(finding.status.value, style=_STYLES[finding.status])
        table.add_row(Text(finding.name), status, found)
    return table
