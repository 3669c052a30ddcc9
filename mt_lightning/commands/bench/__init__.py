"""`megatrain bench`: measurements that anyone can repeat, as tables or JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mt_lightning.commands.bench import adamw, prefetch
from mt_lightning.commands.bench.gpu_command import add_gpu_parser, run_gpu
from mt_lightning.commands.bench.io_command import add_io_parser, run_io
from mt_lightning.commands.bench.machine_command import add_machine_parser, run_machine
from mt_lightning.commands.bench.step_command import add_step_parser, run_step
from mt_lightning.commands.bench.traces import GENERATORS, generate, load
from mt_lightning.commands.output import add_json, progress, show
from mt_lightning.errors import ConfigError
from mt_lightning_command import COMMANDS

_LEAST_PARAMS = 1 << 16
_LEAST_STEPS = 4


def add_bench_parser(commands: Any) -> None:
    """Add `bench` to the subparsers of the command line."""
    bench = commands.add_parser("bench", help=COMMANDS["bench"])
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    parser = benches.add_parser("adamw", help="the update of AdamW on every form of state")
    parser.add_argument(
        "--params", type=float, default=16e6, help="parameters to update (default: 16e6)"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each (default: 15)")
    add_json(parser)
    _add_prefetch_parser(benches)
    add_io_parser(benches)
    add_machine_parser(benches)
    add_step_parser(benches)
    add_gpu_parser(benches)


def _add_prefetch_parser(benches: Any) -> None:
    parser = benches.add_parser("prefetch", help="prediction against LRU and an oracle, on traces")
    names = ", ".join(GENERATORS)
    parser.add_argument(
        "--trace",
        nargs="+",
        choices=list(GENERATORS),
        metavar="NAME",
        help=f"traces that are made up: {names} (default: all, or none with --file)",
    )
    parser.add_argument(
        "--file", nargs="+", default=[], help="traces written by mt_lightning.AccessRecorder"
    )
    parser.add_argument(
        "--frames",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75],
        help="pages that fit in RAM, as a share of the units (default: 0.25 0.5 0.75)",
    )
    parser.add_argument("--steps", type=int, default=100, help="of each made-up trace")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up traces")
    parser.add_argument(
        "--depth", type=int, default=4, help="units that are looked ahead (default: 4)"
    )
    add_json(parser)


def run_bench(options: argparse.Namespace) -> int:
    """Measure and print."""
    return _BENCHES[options.bench](options)


def _run_adamw(options: argparse.Namespace) -> int:
    num_params = int(options.params)
    if num_params < _LEAST_PARAMS or options.rounds < 1 or min(options.threads) < 1:
        raise ConfigError(
            f"bench adamw: --params must be at least {_LEAST_PARAMS}, --rounds and --threads at "
            "least 1."
        )
    with progress() as bar:
        speeds = adamw.measure(num_params, options.threads, options.rounds, bar)
    show(options, lambda: adamw.as_dicts(speeds), lambda: adamw.speed_table(speeds, num_params))
    return 0


def _run_prefetch(options: argparse.Namespace) -> int:
    shares = options.frames
    if not all(0 < share <= 1 for share in shares) or options.steps < _LEAST_STEPS:
        raise ConfigError(
            f"bench prefetch: --frames must be above 0 and at most 1 (got {shares}), --steps at "
            f"least {_LEAST_STEPS} (got {options.steps})."
        )
    if options.depth < 1:
        raise ConfigError(f"bench prefetch: --depth must be at least 1, not {options.depth}.")
    names = options.trace or ([] if options.file else list(GENERATORS))
    traces = [load(path) for path in options.file]
    traces += [generate(name, options.steps, options.seed) for name in names]
    with progress() as bar:
        results = prefetch.compare(traces, shares, options.depth, bar)
    show(
        options,
        lambda: prefetch.as_dicts(results),
        lambda: prefetch.comparison_table(results, options.depth),
    )
    return 0


_BENCHES: dict[str, Callable[[argparse.Namespace], int]] = {
    "adamw": _run_adamw,
    "prefetch": _run_prefetch,
    "io": run_io,
    "machine": run_machine,
    "step": run_step,
    "gpu": run_gpu,
}
