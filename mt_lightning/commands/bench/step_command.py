"""The command `megatrain bench step`: its arguments, its table, its JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from mt_lightning.commands.output import add_json, progress, show
from mt_lightning.errors import ConfigError

_COUNTS = ("width", "layers", "vocab", "batch", "length", "turns", "steps")
_LEAST = {"width": 64, "vocab": 8, "length": 2}


def add_step_parser(benches: Any) -> None:
    """Add `step` to the benches."""
    parser = benches.add_parser("step", help="a step on pages, against plain Lightning and a bound")
    for name, default, text in (
        ("width", 512, "of the Llama that is trained, a multiple of 64"),
        ("layers", 8, "its decoder layers"),
        ("vocab", 4096, "its vocabulary"),
        ("batch", 4, "sequences of a step"),
        ("length", 128, "tokens of a sequence"),
        ("turns", 3, "of each contestant"),
        ("steps", 4, "timed steps of a turn"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--budget",
        nargs="+",
        default=["fits", "smallest"],
        metavar="B",
        help="fits, smallest, a share of weights, gradients and state such as 25%%, or GiB "
        "(default: fits smallest)",
    )
    parser.add_argument(
        "--balance",
        type=float,
        nargs="+",
        default=[],
        metavar="X",
        help="slow the drive down until it takes X times as long as computing",
    )
    parser.add_argument(
        "--read-mb-s", type=float, default=math.inf, help="slow reads down to so many MB/s"
    )
    parser.add_argument(
        "--write-mb-s", type=float, default=math.inf, help="slow writes down to so many MB/s"
    )
    parser.add_argument(
        "--durability",
        choices=("auto", "step", "checkpoint"),
        default="auto",
        help="when steps are committed (default: auto)",
    )
    parser.add_argument("--dir", type=Path, default=Path(), help="where pages lie (default: here)")
    add_json(parser)


def run_step(options: argparse.Namespace) -> int:
    """Measure and print."""
    _check(options)
    # Lightning and the engine are imported by this bench alone.
    from mt_lightning.commands.bench import step
    from mt_lightning.commands.bench.step_runs import Size, Speed

    settings = step.Settings(
        size=Size(
            width=options.width,
            num_layers=options.layers,
            vocab=options.vocab,
            batch=options.batch,
            length=options.length,
        ),
        budgets=options.budget,
        balances=options.balance,
        speed=Speed(
            read_bytes_per_s=options.read_mb_s * 1e6, write_bytes_per_s=options.write_mb_s * 1e6
        ),
        durability=options.durability,
        num_turns=options.turns,
        num_steps=options.steps,
        directory=options.dir,
    )
    with progress() as bar:
        results = step.measure(settings, bar)
    show(options, lambda: [asdict(result) for result in results], lambda: step_table(results))
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in _COUNTS:
        value, least = getattr(options, name), _LEAST.get(name, 1)
        if value < least:
            raise ConfigError(f"bench step: --{name} must be at least {least}, not {value}.")
    if options.width % 64:
        raise ConfigError(f"bench step: --width must be a multiple of 64, not {options.width}.")
    for name in ("read_mb_s", "write_mb_s"):
        if not getattr(options, name) > 0:
            flag = name.replace("_", "-")
            raise ConfigError(f"bench step: --{flag} must be above 0, not {getattr(options, name)}")
    if not all(math.isfinite(balance) and balance > 0 for balance in options.balance):
        raise ConfigError(f"bench step: --balance must be above 0, not {options.balance}.")
    if options.balance and min(options.read_mb_s, options.write_mb_s) < math.inf:
        raise ConfigError("bench step: --balance sets the speeds; leave out --read/write-mb-s.")
    for budget in options.budget:
        if budget not in ("fits", "smallest") and not _is_amount(budget):
            raise ConfigError(
                f"bench step: --budget must be fits, smallest, a share such as 25% or a number of "
                f"GiB, not {budget!r}."
            )
    if not options.dir.is_dir():
        raise ConfigError(f"bench step: --dir {options.dir} is no directory.")


def _is_amount(text: str) -> bool:
    try:
        amount = float(text.removesuffix("%"))
    except ValueError:
        return False
    return math.isfinite(amount) and amount > 0


def step_table(results: Sequence[Any]) -> Table:
    """Show step times.

    Args:
        results: `StepTime` of each contestant.
    """
    table = Table(
        title=f"A step of {results[0].num_params / 1e6:.1f} M parameters",
        title_justify="left",
        title_style="bold",
        caption="medians; all take turns; equal losses; again: units run again in backward; bound: "
        "all processors busy, the drive at its speed; read and written: MiB; waited: s",
        caption_justify="left",
        # So narrow that all columns fit a terminal of 80 characters.
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for heading in ("budget", "GiB", "balance", "again", "s", "CPU s", "/plain", "/bound"):
        table.add_column(heading, justify="left" if heading == "budget" else "right", no_wrap=True)
    for heading in ("read", "written", "waited"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            "" if result.budget_gib is None else f"{result.budget_gib:.3f}",
            "" if result.balance is None else f"{result.balance:g}",
            "yes" if result.recomputed else "",
            f"{result.seconds:.3f}",
            f"{result.cpu_seconds:.3f}",
            f"{result.of_plain:.2f}",
            f"{result.of_bound:.2f}",
            f"{result.read_bytes / 2**20:.0f}",
            f"{result.written_bytes / 2**20:.0f}",
            f"{result.stall_s:.3f}",
        )
    return table
