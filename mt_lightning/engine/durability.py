"""What commits cost: how much a run writes per step, per commit and per day."""

from __future__ import annotations

COMMIT_INTERVAL_S = 300.0
"""Longest time between two commits where not every step is committed; a step may come on top."""

_STEP_S = 5
"""How long a step takes, to say what it would write in a day; nobody knows before the first one."""
_DAY_S = 86400


def wear_rows(durability: str, written_bytes: int, commit_bytes: int) -> list[tuple[str, int, str]]:
    """Return rows for the start table: what is written, how often, and how much that is in a day.

    Args:
        durability: "step" or "checkpoint".
        written_bytes: What a step writes.
        commit_bytes: What a commit writes on top.
    """
    daily = f"at {_STEP_S} s a step {written_bytes * _DAY_S / _STEP_S / 1e12:.2f} TB a day"
    if durability == "step":
        return [("written per step", written_bytes, f"every step is committed; {daily}")]
    minutes = COMMIT_INTERVAL_S / 60
    often = f"at checkpoints, every {minutes:g} minutes, at the end"
    per_day = commit_bytes * _DAY_S / COMMIT_INTERVAL_S / 1e12
    return [
        ("written per step", written_bytes, daily if written_bytes else "all stays in RAM"),
        ("written per commit", commit_bytes, f"{often}; {per_day:.2f} TB a day"),
    ]


def wear_text(durability: str, written_bytes: int, commit_bytes: int) -> str:
    """Return the same as one line for the log."""
    rows = wear_rows(durability, written_bytes, commit_bytes)
    parts = [f"{item} {nbytes / 2**30:.2f} GiB ({words})" for item, nbytes, words in rows]
    return f"durability is {durability!r}: {', '.join(parts)}"
