"""The page of a report: one HTML file with everything in it."""

from __future__ import annotations

import base64
import datetime
import platform
from collections.abc import Iterable, Mapping
from html import escape
from statistics import median

import torch

from mt_lightning.callbacks.recorder import RunCost
from mt_lightning.callbacks.tables import format_bytes, planned_time, time_parts

_DAY_S = 86400
_STYLE = """
:root { color-scheme: light; --ink: #1c2330; --soft: #5d6778; --line: #e3e7ee; --paper: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7fa; color: var(--ink);
       font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 34px 0 10px; }
p.sub { color: var(--soft); margin: 4px 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; }
.card, figure, table, .advice { background: var(--paper); border: 1px solid var(--line);
       border-radius: 10px; }
.card { padding: 12px 16px; } .card b { display: block; font-size: 21px; font-weight: 600; }
.card span { color: var(--soft); font-size: 13px; }
.advice { padding: 12px 16px; margin-top: 14px; border-left: 5px solid #dd8452; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 14px; }
figure { margin: 0; padding: 10px; } figure.wide { grid-column: 1 / -1; }
figure img { width: 100%; display: block; }
table { border-collapse: separate; border-spacing: 0; width: 100%; overflow: hidden; }
th, td { text-align: left; padding: 6px 14px; border-top: 1px solid var(--line); }
tr:first-child th { border-top: 0; background: #eef1f6; font-weight: 600; }
th.n { text-align: right; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""
_ALT = {
    "loss": "training loss over the steps",
    "memory": "memory of the process and of paging over the steps, and the limit",
    "disk": "bytes of files over the steps",
    "time": "what the time of each step went to",
    "traffic": "bytes that each step read and wrote, and what was expected",
    "speed": "speed of the drive while it was busy",
    "timeline": "what each thread did during one step",
}


def page_html(title: str, cost: RunCost, plots: Mapping[str, bytes]) -> str:
    """Return the page.

    Args:
        title: What was trained.
        cost: What it cost.
        plots: PNG files by name.
    """
    plan, records = cost.plan, cost.records
    wall_s = sum(record.wall_s for record in records)
    now = datetime.datetime.now(datetime.timezone.utc)
    sub = (
        f"{len(records)} optimizer steps; {plan.num_units} units in {plan.num_pages} pages; "
        f"{plan.schedule} update. {now:%d %B %Y %H:%M} UTC, {platform.node()}, "
        f"torch {torch.__version__}."
    )
    images = "".join(
        f"<figure{' class=wide' if name == 'timeline' else ''}>"
        f'<img alt="{escape(_ALT[name])}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}"></figure>'
        for name, png in plots.items()
    )
    parts = [
        (
            name.strip() + (f", {note}" if note else ""),
            f"{part_s / len(records):.4f} s",
            f"{part_s / wall_s:.1%}",
        )
        for name, note, part_s in time_parts(records)
    ]
    body = "".join(
        (
            f"<h1>Paging report: {escape(title)}</h1><p class=sub>{escape(sub)}</p>",
            f"<div class=cards>{''.join(_cards(cost))}</div>",
            f"<div class=advice>{escape(cost.advice.text)}</div>",
            f"<h2>Over the steps</h2><div class=plots>{images}</div>",
            "<h2>Measured against planned</h2>",
            _table(("what", "measured", "planned"), _against(cost)),
            "<h2>Where the time of a step went</h2>",
            _table(("what", "mean", "share"), parts),
            "<h2>What lies where</h2>",
            _table(
                ("what", "bytes", "where"),
                [(item, format_bytes(size), place) for item, size, place in plan.rows()],
            ),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Paging report: {escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _cards(cost: RunCost) -> Iterable[str]:
    records = cost.records
    wall_s = sum(record.wall_s for record in records)
    tokens = sum(record.num_tokens for record in records)
    stall_s = sum(record.stall_s for record in records)
    spilled = sum(record.inputs_spilled_bytes for record in records) / len(records)
    written = cost.written_bytes_per_step + spilled
    per_day = written * _DAY_S * len(records) / wall_s
    yield _card(f"{median(record.wall_s for record in records):.2f} s", "a step (median)")
    if tokens:
        yield _card(f"{tokens / wall_s:,.0f}", "tokens per second")
    yield _card(format_bytes(cost.process_peak_bytes), "peak memory of the process")
    yield _card(f"{stall_s / wall_s:.1%}", "of the time waiting")
    yield _card(format_bytes(cost.read_bytes_per_step), "read per step")
    yield _card(format_bytes(written), "written per step")
    yield _card(f"{per_day / 1e12:.2f} TB", "written per day at this pace")


def _card(value: str, name: str) -> str:
    return f"<div class=card><b>{escape(value)}</b><span>{escape(name)}</span></div>"


def _against(cost: RunCost) -> list[tuple[str, str, str]]:
    wall_s = sum(record.wall_s for record in cost.records) / len(cost.records)
    planned = " ".join(planned_time(cost.planned)) if cost.planned is not None else ""
    return [
        (
            "peak memory of paging",
            format_bytes(cost.paging_peak_bytes),
            f"{format_bytes(cost.planned_ram_bytes)}, "
            f"limit {format_bytes(cost.plan.ram_limit_bytes)}",
        ),
        ("peak memory of the process", format_bytes(cost.process_peak_bytes), ""),
        (
            "read per step",
            format_bytes(cost.read_bytes_per_step),
            format_bytes(cost.expected_read_bytes),
        ),
        (
            "written per step",
            format_bytes(cost.written_bytes_per_step),
            format_bytes(cost.expected_written_bytes),
        ),
        ("time per step", f"{wall_s:.2f} s", planned),
    ]


def _table(head: tuple[str, str, str], rows: Iterable[tuple[str, str, str]]) -> str:
    what, number, note = map(escape, head)
    lines = [f"<tr><th>{what}</th><th class=n>{number}</th><th>{note}</th></tr>"]
    lines += [
        f"<tr><td>{escape(name)}</td><td class=n>{escape(value)}</td><td>{escape(note)}</td></tr>"
        for name, value, note in rows
    ]
    return f"<table>{''.join(lines)}</table>"
