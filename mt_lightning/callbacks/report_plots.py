"""The plots of a report, as PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_lightning.callbacks.chrome_trace import Event
from mt_lightning.callbacks.meter import PARTS
from mt_lightning.callbacks.recorder import RunCost
from mt_lightning.callbacks.tables import GIB

_GB = 10**9
_MS = 10**6
_PART_NAMES = {
    "compute_s": "compute",
    "paging_s": "paging",
    "host_s": "host code",
    "stall_read_s": "waiting for reads",
    "stall_write_s": "waiting for writes",
    "stall_memory_s": "waiting for memory",
    "stall_device_s": "waiting for the device",
    "stall_update_s": "waiting for updates",
}
_PHASES = {
    "forward": ("forward", "#4c72b0"),
    "recompute": ("recompute", "#6f9bd8"),
    "backward of": ("backward", "#8172b3"),
    "step optimizer": ("optimizer", "#dd8452"),
    "read": ("read", "#55a868"),
    "write": ("write", "#c44e52"),
    "sync": ("write", "#c44e52"),
    "write record": ("write", "#c44e52"),
    "encode": ("encode, decode", "#937860"),
    "decode": ("encode, decode", "#937860"),
    "take gradient": ("gradients leave", "#da8bc3"),
}
_WAIT = ("waiting", "#d9d9d9")
_THREADS = {"MainThread": "training", "megatrain-update_0": "update"}
_MAX_LANES = 8


@dataclass
class Course:
    """What a fit was like after each optimizer step; all lists have one value a step."""

    losses: list[float] = field(default_factory=list)
    """Mean training loss of the step's batches; NaN where it is not known."""
    process_bytes: list[int] = field(default_factory=list)
    """Anonymous and shared memory of the process."""
    disk_bytes: list[int] = field(default_factory=list)
    """Bytes of the files in the directories of the run."""


def draw(
    cost: RunCost, course: Course, events: Sequence[Event], timeline_step: int
) -> dict[str, bytes]:
    """Draw what there is: "loss", "memory", "disk", "time", "traffic", "speed", "timeline".

    Args:
        cost: The run.
        course: Each of its steps.
        events: Spans of one step, none where nobody listened to it.
        timeline_step: Which step that was.
    """
    records = cost.records
    steps = [record.step for record in records]
    plots = {}
    if not all(math.isnan(loss) for loss in course.losses):
        plots["loss"] = _lines("training loss", steps, {"loss": course.losses}, {}, from_zero=False)
    plots["memory"] = _lines(
        "memory (GiB)",
        steps,
        {
            "process": [value / GIB for value in course.process_bytes],
            "paging": [record.ram_used_bytes / GIB for record in records],
        },
        {"max_ram_gb, for paging": cost.plan.ram_limit_bytes / GIB},
    )
    plots["disk"] = _lines(
        "disk (GiB)", steps, {"files of the run": [n / GIB for n in course.disk_bytes]}, {}
    )
    plots["time"] = _stack(
        "time of a step (s)",
        steps,
        {_PART_NAMES[part]: [getattr(record, part) for record in records] for part in PARTS},
    )
    plots["traffic"] = _lines(
        "bytes of a step (GB)",
        steps,
        {
            "read": [record.read_bytes / _GB for record in records],
            "written": [record.written_bytes / _GB for record in records],
        },
        {
            "read, expected": cost.expected_read_bytes / _GB,
            "written, expected": cost.expected_written_bytes / _GB,
        },
    )
    plots["speed"] = _lines(
        "drive while busy (GB/s)",
        steps,
        {
            "reading": [_speed(r.read_bytes, r.drive_read_s) for r in records],
            "writing": [_speed(r.written_bytes, r.drive_write_s) for r in records],
        },
        {},
    )
    if events:
        plots["timeline"] = _timeline(events, timeline_step)
    return plots


def _speed(nbytes: int, seconds: float) -> float:
    return nbytes / _GB / seconds if seconds > 0 else float("nan")


def _lines(
    label: str,
    steps: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    levels: Mapping[str, float],
    *,
    from_zero: bool = True,
) -> bytes:
    figure, axes = _figure(label, steps)
    marker = "." if len(steps) < 30 else None
    colors = [axes.plot(steps, lines[name], label=name, marker=marker)[0] for name in lines]
    for i, (name, value) in enumerate(levels.items()):
        # The level that belongs to a line has its colour; a level of all lines is black.
        color = colors[i].get_color() if len(levels) == len(lines) else "black"
        axes.axhline(value, label=name, linestyle="--", linewidth=1, color=color)
    if from_zero:
        axes.set_ylim(bottom=0)
    return _png(figure)


def _stack(label: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]]) -> bytes:
    figure, axes = _figure(label, steps)
    shown = {name: values for name, values in parts.items() if max(values) > 0}
    if len(steps) > 1:
        values = [[max(0.0, value) for value in each] for each in shown.values()]
        axes.stackplot(steps, values, labels=list(shown), alpha=0.85)
    else:
        below = 0.0
        for name, (value,) in shown.items():
            axes.bar(steps, [value], bottom=below, label=name, width=0.4)
            below += value
    axes.set_ylim(bottom=0)
    return _png(figure)


def _timeline(events: Sequence[Event], step: int) -> bytes:
    from matplotlib.patches import Patch

    begin_ns = min(event.begin_ns for event in events)
    threads = sorted({event.thread for event in events}, key=_order)[:_MAX_LANES]
    figure, axes = _figure("", None, height=0.9 + 0.42 * len(threads))
    kinds: dict[str, str] = {}
    for row, thread in enumerate(threads):
        bars: dict[str, list[tuple[float, float]]] = {}
        for event in sorted(events, key=lambda each: each.begin_ns):
            kind = _kind(event.phase)
            if event.thread == thread and kind is not None:
                kinds[kind[0]] = kind[1]
                start, length = event.begin_ns - begin_ns, event.end_ns - event.begin_ns
                bars.setdefault(kind[0], []).append((start / _MS, length / _MS))
        # Waiting lies inside of what waits, so it is drawn on top.
        for name in sorted(bars, key=lambda name: name == _WAIT[0]):
            axes.broken_barh(bars[name], (row - 0.35, 0.7), facecolors=kinds[name], linewidth=0)
    axes.set_yticks(range(len(threads)), _titles(threads))
    axes.invert_yaxis()
    axes.set_xlabel(f"time in step {step} (ms)")
    axes.grid(visible=False, axis="y")
    return _png(figure, [Patch(color=color, label=name) for name, color in kinds.items()])


def _kind(phase: str) -> tuple[str, str] | None:
    return _WAIT if phase.startswith("wait for") else _PHASES.get(phase)


def _order(thread: str) -> tuple[int, str]:
    first = ("MainThread", "megatrain-update", "megatrain")
    return next((i for i, each in enumerate(first) if thread.startswith(each)), len(first)), thread


def _titles(threads: Sequence[str]) -> list[str]:
    titles: list[str] = []
    for thread in threads:
        word = next((word for word in ("read", "write") if f"io-{word}" in thread), None)
        if word is not None:
            titles.append(f"{word} {sum(title.startswith(word) for title in titles) + 1}")
        else:
            titles.append(_THREADS.get(thread, thread.removeprefix("megatrain-")))
    return titles


def _figure(label: str, steps: Sequence[int] | None, height: float = 3.2) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # No pyplot: it would choose a backend and keep global figures.
    figure = Figure(figsize=(7 if steps is not None else 14.3, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if steps is not None:
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _png(figure: Any, handles: Sequence[Any] | None = None) -> bytes:
    named = {} if handles is None else {"handles": handles}
    ncols = 4 if handles is None else 9
    figure.legend(loc="outside upper center", ncols=ncols, frameon=False, **named)
    out = io.BytesIO()
    figure.savefig(out, dpi=120, format="png")
    return out.getvalue()
