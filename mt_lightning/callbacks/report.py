"""PagingReport: a page with plots of memory, stall and traffic over the steps."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mt_lightning.callbacks.memory import MemorySampler, process_memory_bytes
from mt_lightning.callbacks.meter import StepMeter, StepRecord
from mt_lightning.callbacks.monitor import paging_engine
from mt_lightning.callbacks.tables import GIB, format_bytes, steady_steps
from mt_lightning.errors import ConfigError

if TYPE_CHECKING:
    from mt_lightning.engine.engine import Engine

log = logging.getLogger(__name__)

_GB = 10**9


class PagingReport(Callback):
    """Write `report.md` with three plots when fit ends, by success or by an error.

    Under another strategy it says so once and does nothing.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Check that plots can be drawn.

        Args:
            directory: where the report goes; None means `paging_report` in the trainer's
                `default_root_dir`.

        Raises:
            ConfigError: if matplotlib is not installed.
        """
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "PagingReport draws with matplotlib, which is not installed. "
                "Run: pip install 'mt-lightning[examples]'."
            )
        self._directory = directory
        self._engine: Engine | None = None
        self._meter: StepMeter | None = None
        self._records: list[StepRecord] = []
        self._process_bytes: list[int] = []
        self._sampler = MemorySampler()
        self._has_warned = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to record."""
        engine = self._engine = paging_engine(trainer)
        if engine is None:
            if not self._has_warned:
                log.info("PagingReport: the strategy is not megatrain; nothing to report.")
                self._has_warned = True
            return
        self._records, self._process_bytes = [], []
        self._meter = StepMeter(lambda: engine.stats, trainer.global_step)
        self._sampler.start()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the counters."""
        if self._meter is not None:
            self._meter.start_batch()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the record of a finished optimizer step."""
        if self._meter is None:
            return
        record = self._meter.end_batch(batch, trainer.global_step)
        if record is not None:
            self._records.append(record)
            self._process_bytes.append(process_memory_bytes())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report."""
        self._close(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the report of what has been done."""
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        engine, self._engine, self._meter = self._engine, None, None
        if engine is None:
            return
        self._sampler.stop()
        if not self._records:
            return
        folder = Path(self._directory or Path(trainer.default_root_dir) / "paging_report")
        folder.mkdir(parents=True, exist_ok=True)
        draw_plots(folder, self._records, self._process_bytes, engine)
        text = _report_text(engine, self._records, self._sampler.peak_bytes)
        (folder / "report.md").write_text(text, encoding="utf-8")
        log.info("Paging report: %s", folder / "report.md")


def draw_plots(
    folder: Path, records: Sequence[StepRecord], process_bytes: Sequence[int], engine: Engine
) -> None:
    """Draw `memory.png`, `time.png` and `traffic.png` over the optimizer steps."""
    steps = [record.step for record in records]
    assert engine.plan is not None
    limit_gib = engine.plan.ram_limit_bytes / GIB
    expected_read, expected_written = engine.expected_bytes_per_step()
    _draw(
        folder / "memory.png",
        "Memory (GiB)",
        steps,
        {
            "process": [value / GIB for value in process_bytes],
            "paging": [record.ram_used_bytes / GIB for record in records],
        },
        {"max_ram_gb": limit_gib},
    )
    _draw(
        folder / "time.png",
        "Time per step (s)",
        steps,
        {
            "whole step": [record.wall_s for record in records],
            "stall": [record.stall_s for record in records],
            "update worker": [record.update_s for record in records],
        },
        {},
    )
    _draw(
        folder / "traffic.png",
        "Bytes per step (GB)",
        steps,
        {
            "read": [record.read_bytes / _GB for record in records],
            "written": [record.written_bytes / _GB for record in records],
        },
        {"read, expected": expected_read / _GB, "written, expected": expected_written / _GB},
    )


def _draw(
    path: Path,
    label: str,
    steps: Sequence[int],
    lines: dict[str, list[float]],
    levels: dict[str, float],
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would choose a backend and keep global figures.
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, values in lines.items():
        axes.plot(steps, values, label=name, marker="." if len(steps) < 30 else None)
    for i, (name, value) in enumerate(levels.items()):
        axes.axhline(value, label=name, linestyle="--", linewidth=1, color=f"C{len(lines) + i}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _report_text(engine: Engine, records: Sequence[StepRecord], process_peak_bytes: int) -> str:
    plan, stats = engine.plan, engine.stats
    assert plan is not None
    steady = steady_steps(records)
    expected_read, expected_written = engine.expected_bytes_per_step()
    wall_s = sum(record.wall_s for record in records)
    stall_s = sum(record.stall_s for record in records)
    read = format_bytes(median(record.read_bytes for record in steady))
    written = format_bytes(median(record.written_bytes for record in steady))
    lines = [
        "# Paging report",
        "",
        f"{len(records)} optimizer steps, {plan.num_units} units in {plan.num_pages} pages, "
        f"{plan.schedule} update.",
        "",
        "| what | bytes | where |",
        "|---|---:|---|",
        *(
            f"| {item} | {format_bytes(num_bytes)} | {place} |"
            for item, num_bytes, place in plan.rows()
        ),
        "",
        "| what | measured | against |",
        "|---|---:|---|",
        f"| peak memory of paging | {format_bytes(stats.ram_peak_bytes)} "
        f"| limit {format_bytes(plan.ram_limit_bytes)} |",
        f"| peak memory of the process | {format_bytes(process_peak_bytes)} | |",
        f"| read per step | {read} | expected {format_bytes(expected_read)} |",
        f"| written per step | {written} | expected {format_bytes(expected_written)} |",
        f"| time per step | {wall_s / len(records):.3f} s | stall {stall_s / wall_s:.1%} |",
        "",
        *(f"![{name}]({name}.png)\n" for name in ("memory", "time", "traffic")),
    ]
    return "\n".join(lines)
