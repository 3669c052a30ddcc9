"""The command `megatrain bench gpu`: its arguments, its table, its JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mt_lightning.commands.output import add_json, progress, show
from mt_lightning.errors import ConfigError


def add_gpu_parser(benches: Any) -> None:
    """Add `gpu` to the benches."""
    parser = benches.add_parser(
        "gpu", help="tokens/s and TFLOP/s of large models on an accelerator"
    )
    parser.add_argument(
        "--size",
        nargs="+",
        default=["1B", "7B", "14B"],
        help="models: tiny, 1B, 7B, 14B, 30B (default: 1B 7B 14B)",
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 4, 16], help="sequences (default: 1 4 16)"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of one (default: 1024)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps (default: 3)")
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed"),
        default="bf16-mixed",
        help="(default: bf16-mixed)",
    )
    parser.add_argument("--max-vram-gb", type=float, help="device budget (default: 70%% of free)")
    parser.add_argument("--max-ram-gb", type=float, help="host budget (default: 80%% of free)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where pages lie (default: here)")
    add_json(parser)


def run_gpu(options: argparse.Namespace) -> int:
    """Measure and print."""
    # Lightning and the engine are imported by this bench alone.
    from mt_lightning.commands.bench import gpu

    unknown = [size for size in options.size if size not in gpu.SIZES]
    if unknown or min(options.batch) < 1 or options.steps < 1 or options.length < 2:
        raise ConfigError(
            f"bench gpu: --size is one or more of {', '.join(gpu.SIZES)} (got "
            f"{' '.join(options.size)}), --batch and --steps at least 1, --length at least 2."
        )
    device = gpu.device_to_measure()
    budgets = {"max_vram_gb": options.max_vram_gb, "max_ram_gb": options.max_ram_gb}
    works = [
        gpu.Work(
            size=size,
            batch=batch,
            length=options.length,
            steps=options.steps,
            precision=options.precision,
        )
        for size in options.size
        for batch in options.batch
    ]
    speeds = []
    with progress() as bar:
        for work in bar.track(works, description="training"):
            speeds.append(gpu.measure(work, options.dir, paged=True, **budgets))
            speeds.append(gpu.measure(work, options.dir, paged=False))
    title = f"{options.length} tokens in {options.precision} on {device}"
    show(options, lambda: gpu.as_dicts(speeds), lambda: gpu.speed_table(speeds, title))
    return 0
