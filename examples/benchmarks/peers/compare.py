"""The same model, batch and drive under several systems, in turns.

    examples/benchmarks/peers/install_torch.sh
    examples/benchmarks/peers/install_deepspeed.sh
    python examples/benchmarks/peers/compare.py --directory DIRECTORY --rounds 3

Each run is a process of its own; the systems take turns, so that what else the machine does meets
all of them. Shown are medians over the rounds of the medians of each run: of all steps but the
first. Memory is `RssAnon + RssShmem` of the process and what it started, sampled from outside: its
peak in the steps that count, and its peak at all (building the model included). A system whose
environment is missing is left out, and said to be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
INTERVAL_S = 0.02
MEGATRAIN = ["run_lightning.py", "megatrain"]
SYSTEMS: dict[str, tuple[str, list[str]]] = {
    "plain": (".venv-torch", ["run_lightning.py", "plain"]),
    "fsdp2-cpu": (".venv-torch", ["run_fsdp2.py"]),
    "zero3-cpu": (".venv-deepspeed", ["run_deepspeed.py", "--optimizer", "cpu"]),
    "zero3-nvme": (".venv-deepspeed", ["run_deepspeed.py", "--optimizer", "nvme"]),
    "megatrain": ("", MEGATRAIN),
    "megatrain-lossless": ("", [*MEGATRAIN, "--compression", "lossless"]),
    "megatrain-dynamic": ("", [*MEGATRAIN, "--compression", "True"]),
    "megatrain-m8v8": ("", [*MEGATRAIN, "--compression", "m8v8"]),
    "megatrain-R1": ("", [*MEGATRAIN, "--compression", "R1"]),
}
COLUMNS = {
    "seconds": ("step", 1.0, "s"),
    "cpu_seconds": ("CPU", 1.0, "s"),
    "peak_bytes": ("memory", 2.0**30, "GiB"),
    "peak_bytes_ever": ("at start", 2.0**30, "GiB"),
    "read_bytes": ("read", 1e9, "GB"),
    "written_bytes": ("written", 1e9, "GB"),
}


def resident(pid: int) -> int:
    """Return RssAnon + RssShmem of a process, in bytes; 0 where it is no more."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    kib = sum(int(fields.get(key, "0 kB").split()[0]) for key in ("RssAnon", "RssShmem"))
    return kib * 1024


def sample(process: psutil.Popen) -> list[tuple[float, int]]:
    """Return (time, memory of the process and all that it started) until it ends."""
    samples: list[tuple[float, int]] = []
    pids = [process.pid]
    while process.poll() is None:
        # Finding the children reads all of /proc: often enough to see them, seldom enough to be
        # no load.
        if len(samples) % 50 == 0:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
        samples.append((time.monotonic(), sum(map(resident, pids))))
        time.sleep(INTERVAL_S)
    return samples


def run_once(name: str, python: str, args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Run one system once in a directory of its own; return its figures."""
    script, *options = SYSTEMS[name][1]
    directory = Path(tempfile.mkdtemp(dir=args.directory, prefix=f"{name}-"))
    (data := directory / "data").mkdir()
    command = [python, str(HERE / script), *options, "--directory", str(data), *rest]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    try:
        with (directory / "out").open("w+") as out, (directory / "err").open("w+") as err:
            process = psutil.Popen(command, stdout=out, stderr=err, env=environment)
            samples = sample(process)
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{(directory / 'err').read_text()[-3000:]}")
        figures = json.loads((directory / "out").read_text().splitlines()[-1])
    finally:
        shutil.rmtree(directory)
    begin, end = figures["counted"]
    figures["peak_bytes"] = max(size for at, size in samples if begin <= at <= end)
    figures["peak_bytes_ever"] = max(size for _, size in samples)
    return figures


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
