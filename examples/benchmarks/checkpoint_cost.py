"""Measure what a checkpoint of a paged run costs, linked and in the standard format.

Run: python examples/benchmarks/checkpoint_cost.py [--sizes 0.1 1 10] [--layers 24] [--json]

Each size is GiB of state (weights and two moments in float32), trained for two steps in a process
of its own. The number of layers, and with it of files, is the same for all sizes: a larger model
has wider layers. `drain` is what is due anyway: the step under way is finished and written. Then
the same checkpoint is saved linked, several times, and by `torch.save` into the standard file:
`first` also syncs the files of the step, which its commit would have done, and `link` is the median
of the others. `load` reads and verifies the linked one. `peak` is the largest resident memory of
the process.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt

BYTES_PER_WEIGHT = 12
NUM_LINKED = 5
"""The linked checkpoint is saved so often."""


class Stack(LightningModule):
    """Square layers, each of them a unit."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False, device="meta") for _ in range(num_layers)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss that reaches every layer."""
        del batch_idx
        x = batch
        for layer in self.layers:
            x = x + layer(x)
        return (x - batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def measure(size_gib: float, num_layers: int, compression: str, directory: Path) -> dict[str, Any]:
    """Train two steps, save and load; return what it took, in seconds and bytes."""
    found: dict[str, Any] = {}
    width = 64 * round((size_gib * 2**30 / BYTES_PER_WEIGHT / num_layers) ** 0.5 / 64)
    linked, standard = mt.PagedCheckpointIO("linked"), mt.PagedCheckpointIO()

    class Run(Stack):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step != 2:
                return
            begin = time.perf_counter()
            self.trainer.strategy.engine.live.drain()
            found["drain_s"] = time.perf_counter() - begin
            path = directory / "linked.ckpt"
            times = []
            for _ in range(NUM_LINKED):
                begin = time.perf_counter()
                self.trainer.save_checkpoint(path)
                times.append(time.perf_counter() - begin)
            found["first_s"], found["link_s"] = times[0], statistics.median(times[1:])
            found["peak_linked_bytes"] = peak_bytes()
            self.trainer.strategy.checkpoint_io = standard
            begin = time.perf_counter()
            self.trainer.save_checkpoint(directory / "standard.ckpt")
            found["standard_s"] = time.perf_counter() - begin
            self.trainer.strategy.checkpoint_io = linked

    strategy = mt.MegaTrainStrategy(
        directory / "pages",
        max_ram_gb=max(0.5, 12 * width * width * 4 / 2**30),
        checkpoint_io=linked,
        optimizer_compression=compression if compression != "raw" else False,
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Run(num_layers, width), DataLoader(torch.randn(2, width)))  # pyright: ignore
    begin = time.perf_counter()
    linked.load_checkpoint(directory / "linked.ckpt")
    found["load_s"] = time.perf_counter() - begin
    found["state_bytes"] = num_layers * width * width * BYTES_PER_WEIGHT
    found["num_files"] = 2 * num_layers
    return found


def peak_bytes() -> int:
    """Return the largest resident memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_apart(size_gib: float, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one size in a process of its own and clean up behind it."""
    directory = Path(tempfile.mkdtemp(dir=options.dir, prefix="checkpoint-cost-"))
    command = [sys.executable, __file__, "--one", str(size_gib), "--dir", str(directory)]
    command += ["--compression", options.compression, "--layers", str(options.layers)]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    finally:
        shutil.rmtree(directory)
    return json.loads(done.stdout.splitlines()[-1])


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Lay the results out."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("state", "files", "drain", "first", "link", "torch.save", "load", "peak, linked"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row['state_bytes'] / 2**30:.2f} GiB",
            str(row["num_files"]),
            f"{row['drain_s']:.2f} s",
            f"{row['first_s']:.2f} s",
            f"{row['link_s']:.2f} s",
            f"{row['standard_s']:.2f} s",
            f"{row['load_s']:.2f} s",
            f"{row['peak_linked_bytes'] / 2**30:.2f} GiB",
        )
    return table


def main() -> None:
    """Measure every size and show a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 1.0, 10.0], metavar="GIB")
    parser.add_argument("--layers", type=int, default=24, help="how many, in every size")
    parser.add_argument("--dir", type=Path, help="where pages and checkpoints go for the time")
    parser.add_argument("--compression", default="raw", help="raw, lossless or a packed format")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        logging.disable(logging.INFO)
        warnings.filterwarnings("ignore")
        print(json.dumps(measure(options.one, options.layers, options.compression, options.dir)))
        return
    rows = [run_apart(size, options) for size in options.sizes]
    if options.json:
        print(json.dumps(rows))
    else:
        Console(width=100).print(table_of(rows))


if __name__ == "__main__":
    main()
