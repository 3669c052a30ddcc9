"""`megatrain plan`: what a run needs and how fast it would be, before anything is started."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from mt_lightning.commands.plan.machine import find
from mt_lightning.commands.plan.model import find_model, worker_for
from mt_lightning.commands.plan.tables import as_data, finite, machine_data, played_table, show
from mt_lightning.engine.options import Options
from mt_lightning.errors import ConfigError
from mt_lightning.planning.advice import Adviser
from mt_lightning.planning.costs import Prices, costs_of
from mt_lightning.planning.footprint import footprint
from mt_lightning.planning.machines import DRIVES, MACHINES
from mt_lightning.planning.planner import answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.training import OPTIMIZERS, PRECISIONS, Training
from mt_lightning_command import COMMANDS

_EXIT_DOES_NOT_FIT = 1
_FIELDS = {
    "accumulate_grad_batches": "accumulate",
    "num_checkpoints": "checkpoints",
    "optimizer_compression": "compression",
    "per_hour": "price_per_hour",
    "per_kwh": "price_per_kwh",
}
"""Fields and the options that set them, where the names differ."""
_EPILOG = """\
examples:
  megatrain plan 8B --machine rtx4090
  megatrain plan 100B --machine h200 --accumulate 16 --compression true --tokens 1e9
  megatrain plan path/to/config.json --machine h100 --ram-gb 512 --drives 4xgen5
  megatrain plan tiny --machine here
"""


def add_plan_parser(commands: Any) -> None:
    """Add `plan` to the subparsers of the command line."""
    parser = commands.add_parser(
        "plan",
        help=COMMANDS["plan"],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # A size below zero is a size, not an option.
    parser._negative_number_matcher = re.compile(r"-\d")
    parser.add_argument(
        "model", help="a size (8B, 100B, 30B-A3B), a Hugging Face config, or a model of conf/"
    )
    _add_machine(parser.add_argument_group("machine"))
    _add_training(parser.add_argument_group("training"))
    group = parser.add_argument_group("answers")
    group.add_argument("--tokens", type=float, help="of the whole training, for days and costs")
    group.add_argument("--price-per-hour", type=float, help="rent of the machine")
    group.add_argument("--price-per-kwh", type=float, help="energy")
    group.add_argument("--footprint", action="store_true", help="compare with training in memory")
    group.add_argument(
        "--simulate", action="store_true", help="play a step by the policies that run"
    )
    group.add_argument("--no-advice", action="store_true", help="do not look for faster settings")
    group.add_argument("--plot", type=Path, metavar="FILE", help="write curves (.png, .svg)")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_machine(group: Any) -> None:
    names = ", ".join(MACHINES)
    group.add_argument(
        "--machine",
        default="here",
        help=f"{names}; here: this one, as megatrain bench machine measured it; custom; or the "
        "file of a profile (default: here)",
    )
    group.add_argument("--dir", nargs="+", default=[], help="with here: where pages would lie")
    group.add_argument(
        "--time-units",
        action="store_true",
        help="with here: run a unit of each kind in memory for the time it takes",
    )
    group.add_argument("--ram-gb", type=float, help="RAM in GiB")
    group.add_argument("--device-gb", type=float, help="memory of the accelerator in GiB")
    group.add_argument("--tflops", type=float, help="what matrix products reach")
    group.add_argument("--link-gb-per-s", type=float, help="between host and device, each way")
    group.add_argument("--drives", help=f"such as 4xgen5; kinds: {', '.join(DRIVES)}")
    group.add_argument("--read-gb-per-s", type=float, help="of each drive")
    group.add_argument("--write-gb-per-s", type=float, help="of each drive")
    group.add_argument("--disk-tb", type=float, help="room on each drive")


def _add_training(group: Any) -> None:
    group.add_argument("--batch-size", type=int, default=1, help="sequences (default: 1)")
    group.add_argument("--sequence-length", type=int, default=2048, help="(default: 2048)")
    group.add_argument("--accumulate", type=int, default=1, help="micro-batches (default: 1)")
    group.add_argument("--precision", default="bf16-mixed", help=", ".join(PRECISIONS))
    group.add_argument("--optimizer", default="adamw", help=", ".join(OPTIMIZERS))
    group.add_argument("--clip-norm", action="store_true", help="gradients are clipped by norm")
    group.add_argument("--checkpoints", type=int, default=0, help="linked ones kept (default: 0)")
    group.add_argument("--max-ram-gb", type=float, help="GiB of RAM for pages and what they need")
    group.add_argument("--max-vram-gb", type=float, help="GiB of the accelerator's memory")
    group.add_argument("--max-disk-gb", type=float, help="GiB that files may take")
    group.add_argument("--compression", default="false", help="false, lossless, true, a format")
    group.add_argument("--layer-major", default="auto", help="auto, true, false")
    group.add_argument("--recompute", default="auto", help="auto, true, false")
    group.add_argument("--durability", default="auto", help="auto, step, checkpoint")
    group.add_argument("--units", nargs="+", help="class names of modules that run as one piece")
    group.add_argument("--resident", nargs="+", help="names of modules that stay in RAM")


def run_plan(options: argparse.Namespace) -> int:
    """Plan and print; 1 where it does not fit."""
    for name, value in vars(options).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give a finite number.")
    if options.plot is not None:
        from mt_lightning.commands.plan.plot import check_plot  # matplotlib is an extra

        check_plot(options.plot)
    try:
        training = _training(options)
        prices = Prices(
            tokens=options.tokens, per_hour=options.price_per_hour, per_kwh=options.price_per_kwh
        )
    except ConfigError as error:
        raise ConfigError(_by_option(str(error), options)) from error
    machine = find(options)
    model = find_model(options.model, training.options)
    worker = worker_for(model, on_host=machine.on_host, times=options.time_units)
    found = answer(model, training, machine, worker)
    best = costs = None
    items, played = [], None
    if found.fits:
        if not options.no_advice:
            best = Adviser(model, machine, worker, found).best(training)
        costs = costs_of(found, prices)
        items = footprint(found) if options.footprint else []
        played = simulate(found) if options.simulate else None
    if options.json:
        data = as_data(found, best, costs, items)
        if played is not None:
            data["simulated"] = {
                **vars(played),
                "compute_share": played.compute_share,
                "read_bytes": played.read_bytes,
                "written_bytes": played.written_bytes,
            }
        data = finite({**data, "machine_rates": machine_data(machine)})
        print(json.dumps(data, indent=2, allow_nan=False))
    else:
        console = Console()
        show(console, found, best, costs, items)
        if played is not None:
            console.print(played_table(played))
    if options.plot is not None:
        from mt_lightning.commands.plan.plot import plot

        plot(options.plot, training, machine, found)
    return 0 if found.fits else _EXIT_DOES_NOT_FIT


def _training(options: argparse.Namespace) -> Training:
    return Training(
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        accumulate_grad_batches=options.accumulate,
        precision=options.precision,
        optimizer=options.optimizer,
        clips_norm=options.clip_norm,
        num_checkpoints=options.checkpoints,
        options=Options(
            max_ram_gb=options.max_ram_gb,
            max_vram_gb=options.max_vram_gb,
            max_disk_gb=options.max_disk_gb,
            optimizer_compression=_word(options.compression),
            layer_major=_word(options.layer_major),
            recompute=_word(options.recompute),
            durability=options.durability,
            units=options.units,
            resident=options.resident,
        ),
    )


def _by_option(text: str, options: argparse.Namespace) -> str:
    """Name fields as the options that set them."""
    names = {name: name for name in vars(options)} | _FIELDS
    words = "|".join(sorted(names, key=len, reverse=True))
    # A name that is a word of the language too is a field only where a value follows.
    field = re.compile(rf"\b(?:({words})(?==)|({'|'.join(n for n in names if '_' in n)}))\b")
    return field.sub(lambda found: "--" + names[found[0]].replace("_", "-"), text)


def _word(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), text)
