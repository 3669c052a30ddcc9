"""The same model, batch and drive under several systems, in turns.

    examples/benchmarks/peers/install_torch.sh
    examples/benchmarks/peers/install_deepspeed.sh
    python examples/benchmarks/peers/compare.py --directory DIRECTORY --rounds 3

Each run is a process of its own; the systems take turns, so that what else the machine does meets
all of them. Shown are medians over the rounds of the medians of each run. A system whose
environment is missing is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SYSTEMS: dict[str, tuple[str, list[str]]] = {
    "plain": (".venv-torch", ["run_lightning.py", "plain"]),
    "fsdp2-cpu": (".venv-torch", ["run_fsdp2.py"]),
    "zero3-cpu": (".venv-deepspeed", ["run_deepspeed.py", "--optimizer", "cpu"]),
    "zero3-nvme": (".venv-deepspeed", ["run_deepspeed.py", "--optimizer", "nvme"]),
    "megatrain": ("", ["run_lightning.py", "megatrain"]),
    "megatrain-R1": ("", ["run_lightning.py", "megatrain", "--compression", "R1"]),
}
COLUMNS = {
    "seconds": ("step", 1.0, "s"),
    "cpu_seconds": ("CPU", 1.0, "s"),
    "peak_bytes": ("peak memory", 2.0**30, "GiB"),
    "read_bytes": ("read", 1e9, "GB"),
    "written_bytes": ("written", 1e9, "GB"),
}


def run_once(name: str, python: str, args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Run one system once in a directory of its own; return its figures."""
    script, *options = SYSTEMS[name][1]
    directory = Path(tempfile.mkdtemp(dir=args.directory, prefix=f"{name}-"))
    command = [python, str(HERE / script), *options, "--directory", str(directory), *rest]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    finally:
        shutil.rmtree(directory)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run all rounds and show a table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Other options (--width, --layers, --length, --max-ram-gb ...) go to every system.",
    )
    parser.add_argument("--directory", type=Path, required=True, help="on the drive to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--environments", type=Path, default=HERE, help="where they are installed")
    parser.add_argument("--json", type=Path)
    args, rest = parser.parse_known_args()
    console = Console(width=100)
    pythons = {}
    for name in args.systems:
        environment = SYSTEMS[name][0]
        python = args.environments / environment / "bin/python" if environment else sys.executable
        if Path(python).exists():
            pythons[name] = str(python)
        else:
            console.print(f"{name}: no {python}, left out")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for _ in range(args.rounds):
        for name, python in pythons.items():
            found[name].append(run_once(name, python, args, rest))
            console.print(f"{name}: {found[name][-1]['seconds']:.2f} s a step")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("system")
    for title, *_ in COLUMNS.values():
        table.add_column(title, justify="right")
    table.add_column("last loss", justify="right")
    for name, runs in found.items():
        cells = [
            f"{median(run[key] for run in runs) / unit:.2f} {symbol}"
            for key, (_, unit, symbol) in COLUMNS.items()
        ]
        table.add_row(name, *cells, f"{runs[-1]['losses'][-1]:.6f}")
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
