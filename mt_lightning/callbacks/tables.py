"""The tables that the monitor shows: what goes where, and what the run cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from mt_lightning.callbacks.meter import StepRecord
from mt_lightning.pager.stats import Stats

if TYPE_CHECKING:
    from mt_lightning.engine.plan import Plan

GIB = 1024**3
_MIB = 1024**2
_TABLE_STYLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "min_width": 72}


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes in GiB or MiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB"


def plan_table(plan: Plan) -> Table:
    """Show what goes where, before the run."""
    table = Table(title="What goes where", **_TABLE_STYLE)
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("where")
    for item, num_bytes, place in plan.rows():
        table.add_row(Text(item), format_bytes(num_bytes), Text(place))
    table.caption = Text(
        f"{plan.num_units} units in {plan.num_pages} pages, {plan.schedule} update"
    )
    table.caption_justify = "left"
    return table


def closing_table(
    plan: Plan,
    stats: Stats,
    records: Sequence[StepRecord],
    *,
    process_peak_bytes: int,
    expected_bytes_per_step: tuple[int, int],
) -> Table:
    """Show what the run cost, against what was expected.

    Args:
        plan: the plan of the engine.
        stats: its counters after the run.
        records: one per optimizer step.
        process_peak_bytes: the most anonymous and shared memory of the whole process.
        expected_bytes_per_step: bytes read and written by a step, as the engine predicts them.
    """
    table = Table(title=f"What {_count(len(records), 'step')} took", **_TABLE_STYLE)
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("against")
    held_bytes = plan.weight_bytes + plan.state_bytes + plan.grad_bytes
    table.add_row(
        "weights, gradients, optimizer state",
        format_bytes(held_bytes),
        f"{format_bytes(plan.weight_bytes)} + {format_bytes(plan.grad_bytes)} + "
        f"{format_bytes(plan.state_bytes)}",
    )
    table.add_row(
        "peak memory of paging",
        format_bytes(stats.ram_peak_bytes),
        f"limit {format_bytes(plan.ram_limit_bytes)}",
    )
    table.add_row(
        "peak memory of the process",
        format_bytes(process_peak_bytes),
        "all of it: libraries, activations, paging",
        end_section=True,
    )
    steady = steady_steps(records)
    for name, field, expected in (
        ("read per step", "read_bytes", expected_bytes_per_step[0]),
        ("written per step", "written_bytes", expected_bytes_per_step[1]),
    ):
        measured = median(getattr(record, field) for record in steady) if steady else 0
        table.add_row(name, format_bytes(measured), f"expected {format_bytes(expected)}")
    if records:
        _add_time_rows(table, records)
    return table


def steady_steps(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Leave out the first steps, which start from an empty pool, where there are enough."""
    return records[2:] if len(records) >= 5 else records[-1:]


def _add_time_rows(table: Table, records: Sequence[StepRecord]) -> None:
    table.add_section()
    wall_s = sum(record.wall_s for record in records)
    parts = {
        "read": sum(record.stall_read_s for record in records),
        "update": sum(record.stall_update_s for record in records),
        "memory": sum(record.stall_memory_s for record in records),
    }
    stall_s = sum(parts.values())
    update_s = sum(record.update_s for record in records)
    tokens = sum(record.num_tokens for record in records)
    per_step = wall_s / len(records)
    speed = f"{tokens / wall_s:.0f} tokens/s" if tokens else ""
    table.add_row("time per step", f"{per_step:.2f} s", speed)
    table.add_row("  compute", _share(wall_s - stall_s, wall_s), "")
    waits = ", ".join(f"{name} {_share(part, wall_s)}" for name, part in parts.items())
    table.add_row("  stall", _share(stall_s, wall_s), f"waiting for: {waits}")
    table.add_row("update worker busy", _share(update_s, wall_s), "beside compute and stall")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
