"""The tables that the monitor shows: what goes where, and what the run cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from mt_lightning.callbacks.meter import StepRecord
from mt_lightning.callbacks.recorder import RunCost
from mt_lightning.engine.plan import Plan
from mt_lightning.planning.timing import StepTime

_TIME_ROWS = (
    ("compute", "compute_s", "code of the model"),
    ("  of it again", "recompute_s", "units that backward ran again"),
    ("stall", "stall_read_s", "waiting for reads"),
    ("stall", "stall_write_s", "waiting for writes"),
    ("stall", "stall_memory_s", "waiting for memory"),
    ("stall", "stall_device_s", "waiting for the device"),
    ("update", "stall_update_s", "waiting for updates"),
    ("paging", "paging_s", "work of the kit beside compute"),
    ("host code", "host_s", "loop, data loader, hooks"),
)
_RARE = ("recompute_s", "stall_write_s", "stall_device_s")
_BESIDE_ROWS = (
    ("update worker", "update_s", "busy, beside the rows above"),
    ("drive", "drive_read_s", "reading, beside them"),
    ("drive", "drive_write_s", "writing, beside them"),
)

GIB = 1024**3
_MIB = 1024**2
_DAY_S = 86400
_TABLE_STYLE: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
    "min_width": 72,
}


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes in GiB or MiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB"


def plan_table(plan: Plan) -> Table:
    """Show what goes where, before the run."""
    table = Table(title="What goes where", **_TABLE_STYLE)
    table.add_column("what")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    for item, num_bytes, place in plan.rows():
        table.add_row(Text(item), format_bytes(num_bytes), Text(place))
    units, pages = _count(plan.num_units, "unit"), _count(plan.num_pages, "page")
    table.caption = Text(f"{units} in {pages}, {plan.schedule} update")
    return table


def cost_table(cost: RunCost) -> Table:
    """Show what the run cost, against what was expected."""
    plan = cost.plan
    table = Table(title=f"What {_count(len(cost.records), 'step')} took", **_TABLE_STYLE)
    table.add_column("what")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("against")
    beside = cost.process_peak_bytes - cost.paging_peak_bytes
    parts = (plan.weight_bytes, plan.grad_bytes, plan.state_bytes)
    table.add_row(
        "weights, gradients, state", format_bytes(sum(parts)), " + ".join(map(format_bytes, parts))
    )
    table.add_row(
        "peak memory of paging",
        format_bytes(cost.paging_peak_bytes),
        f"planned {format_bytes(cost.planned_ram_bytes)}, "
        f"limit {format_bytes(plan.ram_limit_bytes)}",
    )
    if cost.units_run:
        table.add_row(
            "  of it graphs of units",
            format_bytes(cost.graph_peak_bytes),
            f"kept for {cost.units_kept} of {_count(cost.units_run, 'unit')}",
        )
    table.add_row(
        "peak memory of the process",
        format_bytes(cost.process_peak_bytes),
        f"{format_bytes(beside)} beside paging",
        end_section=True,
    )
    for name, measured, expected in (
        ("read per step", cost.read_bytes_per_step, cost.expected_read_bytes),
        ("written per step", cost.written_bytes_per_step, cost.expected_written_bytes),
    ):
        table.add_row(name, format_bytes(measured), f"expected {format_bytes(expected)}")
    spilled = _add_input_rows(table, cost.records)
    per_step = cost.written_bytes_per_step + spilled
    if plan.order_reason:
        name = "unit by unit" if plan.order == "layer-major" else "usual"
        table.add_row("order of batches", name, Text(plan.order_reason))
    per_day = per_step * _DAY_S / _seconds_per_step(cost.records)
    table.add_row("written per day", f"{per_day / 1e12:.2f} TB", "at this speed; drives wear by it")
    table.add_section()
    _add_time_rows(table, cost.records)
    if cost.planned is not None:
        table.add_row("time per step, planned", *planned_time(cost.planned), end_section=True)
    table.caption = Text(cost.advice.text)
    return table


def time_parts(records: Sequence[StepRecord]) -> list[tuple[str, str, float]]:
    """Return what the time of steps went to: a name, a note, and seconds of all steps."""
    sums = [(n, note, f, sum(getattr(r, f) for r in records)) for n, f, note in _TIME_ROWS]
    return [(n, note, s) for n, note, f, s in sums if s > 0 or f not in _RARE]


def planned_time(planned: StepTime) -> tuple[str, str]:
    """Return the planned time of a step, and what sets it."""
    return f"{planned.seconds:.2f} s", f"at least, set by {planned.bottleneck}"


def _add_input_rows(table: Table, records: Sequence[StepRecord]) -> float:
    """Show what became of the inputs of units; return the bytes written of them per step."""
    held, spilled, read = (
        sum(each) / len(records)
        for each in zip(
            *((r.inputs_bytes, r.inputs_spilled_bytes, r.inputs_read_bytes) for r in records),
            strict=True,
        )
    )
    table.add_row("unit inputs per step", format_bytes(held), "kept for backward")
    if spilled or read:
        table.add_row("  spilled", format_bytes(spilled), "written beside the rows above")
        table.add_row("  read back", format_bytes(read), "for backward")
    return spilled


def _add_time_rows(table: Table, records: Sequence[StepRecord]) -> None:
    wall_s = _seconds_per_step(records) * len(records)
    num_tokens = sum(record.num_tokens for record in records)
    speed = f"{num_tokens / wall_s:.0f} tokens/s" if num_tokens else ""
    table.add_row("time per step", f"{wall_s / len(records):.2f} s", speed)
    for name, note, part_s in time_parts(records):
        table.add_row(f"  {name}", _share(part_s, wall_s), note)
    for name, field, note in _BESIDE_ROWS:
        part_s = sum(getattr(record, field) for record in records)
        table.add_row(name, _share(part_s, wall_s), note)


def _seconds_per_step(records: Sequence[StepRecord]) -> float:
    return sum(record.wall_s for record in records) / len(records)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
