"""`megatrain bench`: measurements that anyone can repeat, as tables or JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import Progress

from mt_lightning.commands.bench import adamw
from mt_lightning.errors import ConfigError

_LEAST_PARAMS = 1 << 16


def add_bench_parser(commands: Any) -> None:
    """Add `bench` to the subparsers of the command line."""
    bench = commands.add_parser("bench", help="measure what this machine does")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    parser = benches.add_parser("adamw", help="the update of AdamW on every form of state")
    parser.add_argument(
        "--params", type=float, default=16e6, help="parameters to update (default: 16e6)"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each (default: 15)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_bench(options: argparse.Namespace) -> int:
    """Measure and print."""
    num_params = int(options.params)
    if num_params < _LEAST_PARAMS or options.rounds < 1 or min(options.threads) < 1:
        raise ConfigError(
            f"bench adamw: --params must be at least {_LEAST_PARAMS}, --rounds and --threads at "
            "least 1."
        )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        speeds = adamw.measure(num_params, options.threads, options.rounds, progress)
    if options.json:
        print(json.dumps(adamw.as_dicts(speeds), indent=2))
    else:
        Console().print(adamw.speed_table(speeds, num_params))
    return 0
