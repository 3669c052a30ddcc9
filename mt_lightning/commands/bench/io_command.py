"""The command `megatrain bench io`: its arguments, its table, its JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mt_lightning.commands.bench.io import Moved, measure
from mt_lightning.commands.output import add_json, progress, show
from mt_lightning.errors import ConfigError

_GIB = 1 << 30
_GB = 1e9


def add_io_parser(benches: Any) -> None:
    """Add `io` to the benches."""
    parser = benches.add_parser("io", help="reads and writes of pages, with fio beside them")
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        default=[Path()],
        metavar="DIR",
        help="where to measure; several are measured alone and at once (default: here)",
    )
    parser.add_argument(
        "--size", type=float, default=1.0, help="GiB of each of two files (default: 1)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--no-fio", action="store_true", help="leave fio out")
    add_json(parser)


def run_io(options: argparse.Namespace) -> int:
    """Measure and print."""
    if not (math.isfinite(options.size) and options.size > 0) or options.rounds < 1:
        raise ConfigError(
            f"bench io: --size must be above 0 (got {options.size}), --rounds at least 1 "
            f"(got {options.rounds})."
        )
    with progress() as bar:
        results = measure(
            options.directories,
            int(options.size * _GIB),
            options.rounds,
            bar,
            with_fio=not options.no_fio,
        )
    show(options, lambda: [asdict(moved) for moved in results], lambda: io_table(results))
    return 0


def io_table(results: Sequence[Moved]) -> Table:
    """Show what was moved."""
    notes = ["GB/s; medians; all take turns; CPU in seconds for each GiB"]
    if any(moved.fio_bytes_per_s is None for moved in results):
        notes.append("fio was not run")
    if any(not moved.direct for moved in results):
        notes.append("the file system refuses direct I/O: the page cache is part of these rates")
    if any(moved.in_memory for moved in results):
        notes.append("these files lie in RAM: no drive was measured")
    table = Table(
        title="Pages read and written",
        title_justify="left",
        title_style="bold",
        caption="; ".join(notes),
        caption_justify="left",
    )
    table.add_column("directory", overflow="fold", min_width=9)
    table.add_column("operation", no_wrap=True)
    for heading in ("reads", "writes", "CPU", "fio", "CPU", "of fio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, moved in enumerate(results):
        last = i + 1 == len(results) or results[i + 1].directory != moved.directory
        table.add_row(
            moved.directory,
            moved.operation,
            _rate(moved.read_bytes_per_s),
            _rate(moved.write_bytes_per_s),
            f"{moved.cpu_s_per_gib:.3f}",
            _rate(moved.fio_bytes_per_s or 0),
            "" if moved.fio_cpu_s_per_gib is None else f"{moved.fio_cpu_s_per_gib:.3f}",
            "" if moved.of_fio is None else f"{moved.of_fio:.2f}",
            end_section=last,
        )
    return table


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GB:.2f}" if bytes_per_s else ""
