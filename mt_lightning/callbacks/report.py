"""PagingReport: a page with plots of memory, time and traffic over the steps."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from mt_lightning.callbacks.memory import process_memory_bytes
from mt_lightning.callbacks.meter import StepRecord
from mt_lightning.callbacks.recorder import PagingRecorder, RunCost
from mt_lightning.callbacks.tables import GIB, format_bytes, time_parts
from mt_lightning.engine.plan import Plan
from mt_lightning.errors import ConfigError

log = logging.getLogger(__name__)

_GB = 10**9
_PLOTS = ("memory", "time", "traffic")


class PagingReport(PagingRecorder):
    """Write `report.md` with three plots when fit ends, by success or by an error.

    Under another strategy it says so once and does nothing.

    Args:
        directory: where the report goes; None means `paging_report` in the trainer's
            `default_root_dir`.

    Raises:
        ConfigError: if matplotlib is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "PagingReport draws with matplotlib, which is not installed. "
                "Run: pip install 'mt-lightning[examples]'."
            )
        self._directory = directory
        self._process_bytes: list[int] = []

    def on_begin(self, trainer: Trainer, plan: Plan) -> None:
        """Forget an earlier fit."""
        self._process_bytes = []

    def on_step(self, trainer: Trainer, pl_module: LightningModule, record: StepRecord) -> None:
        """Note the memory of the process."""
        self._process_bytes.append(process_memory_bytes())

    def on_close(self, trainer: Trainer, cost: RunCost) -> None:
        """Write the report."""
        folder = Path(self._directory or Path(trainer.default_root_dir) / "paging_report")
        folder.mkdir(parents=True, exist_ok=True)
        draw_plots(folder, cost, self._process_bytes)
        (folder / "report.md").write_text(_report_text(cost), encoding="utf-8")
        log.info("Paging report: %s", folder / "report.md")


def draw_plots(folder: Path, cost: RunCost, process_bytes: Sequence[int]) -> None:
    """Draw `memory.png`, `time.png` and `traffic.png` over the optimizer steps.

    Args:
        folder: where they go.
        cost: the run.
        process_bytes: memory of the process at the end of each step.
    """
    records = cost.records
    lines = {
        "memory": {
            "process": [value / GIB for value in process_bytes],
            "paging": [record.ram_used_bytes / GIB for record in records],
        },
        "time": {
            "whole step": [record.wall_s for record in records],
            "compute": [record.compute_s for record in records],
            "stall": [record.stall_s for record in records],
            "host code": [record.host_s for record in records],
        },
        "traffic": {
            "read": [record.read_bytes / _GB for record in records],
            "written": [record.written_bytes / _GB for record in records],
        },
    }
    levels = {
        "memory": {"max_ram_gb": cost.plan.ram_limit_bytes / GIB},
        "time": {},
        "traffic": {
            "read, expected": cost.expected_read_bytes / _GB,
            "written, expected": cost.expected_written_bytes / _GB,
        },
    }
    labels = {
        "memory": "memory (GiB)",
        "time": "time per step (s)",
        "traffic": "bytes per step (GB)",
    }
    steps = [record.step for record in records]
    for name in _PLOTS:
        _draw(folder / f"{name}.png", labels[name], steps, lines[name], levels[name])


def _draw(
    path: Path,
    label: str,
    steps: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    levels: Mapping[str, float],
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # No pyplot: it would choose a backend and keep global figures.
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    marker = "." if len(steps) < 30 else None
    colors = [axes.plot(steps, lines[name], label=name, marker=marker)[0] for name in lines]
    for i, (name, value) in enumerate(levels.items()):
        # The level that belongs to a line has its colour; a level of all lines is black.
        color = colors[i].get_color() if len(levels) == len(lines) else "black"
        axes.axhline(value, label=name, linestyle="--", linewidth=1, color=color)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)


def _report_text(cost: RunCost) -> str:
    plan, records = cost.plan, cost.records
    wall_s = sum(record.wall_s for record in records)
    stall_s = sum(record.stall_s for record in records)
    lines = [
        "# Paging report",
        "",
        f"{len(records)} optimizer steps; {plan.num_units} units in {plan.num_pages} pages; "
        f"{plan.schedule} update.",
        "",
        "| what | bytes | where |",
        "|---|---:|---|",
        *(f"| {item} | {format_bytes(size)} | {place} |" for item, size, place in plan.rows()),
        "",
        "| what | measured | against |",
        "|---|---:|---|",
        f"| peak memory of paging | {format_bytes(cost.paging_peak_bytes)} "
        f"| limit {format_bytes(plan.ram_limit_bytes)} |",
        f"| peak memory of the process | {format_bytes(cost.process_peak_bytes)}  | |",
        f"| read per step | {format_bytes(cost.read_bytes_per_step)} "
        f"| expected {format_bytes(cost.expected_read_bytes)} |",
        f"| written per step | {format_bytes(cost.written_bytes_per_step)} "
        f"| expected {format_bytes(cost.expected_written_bytes)} |",
        f"| time per step | {wall_s / len(records):.3f} s | stall {stall_s / wall_s:.1%} |",
        "",
        "| where the time of a step went | s | share |",
        "|---|---:|---:|",
        *(
            f"| {name.strip()}{', ' + note if note else ''} | {part_s / len(records):.4f} "
            f"| {part_s / wall_s:.1%} |"
            for name, note, part_s in time_parts(records)
        ),
        "",
        cost.advice.text,
        "",
        *(f"![{name}]({name}.png)\n" for name in _PLOTS),
    ]
    return "\n".join(lines)
