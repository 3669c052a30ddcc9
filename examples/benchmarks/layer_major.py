"""Time and bytes of a step in the usual order and in layer-major order, on a slowed-down drive.

    python examples/benchmarks/layer_major.py --read-mb-per-s 200 --micro-batches 1 4 16

The model is a stack of linear layers with a memory budget below half of its weights. The first two
steps are not timed: the first one takes the usual order in both.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.tiers.doubles import ThrottledStore

NUM_UNTIMED_STEPS = 2


class Stack(pl.LightningModule):
    """Linear layers with residuals."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean square of what the layers make of a batch."""
        for layer in self.layers:
            batch = batch + layer(batch).tanh()
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Watch(pl.Callback):
    """Notes time and bytes read at the end of each step."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note them when an optimizer step has been taken."""
        if trainer.global_step > len(self.marks):
            engine = trainer.strategy.engine
            self.marks.append((time.perf_counter(), engine.stats.bytes_read))


def measure(arguments: argparse.Namespace, num_micros: int, *, layer_major: bool) -> list[float]:
    """Return seconds and GB read per step."""
    model = Stack(arguments.width, arguments.layers)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    num_steps = NUM_UNTIMED_STEPS + arguments.steps
    data = torch.randn(num_steps * num_micros, arguments.rows, arguments.width)
    watch = Watch()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        strategy = mt.MegaTrainStrategy(
            offload_dir=directory,
            max_ram_gb=arguments.budget * weight_bytes / 2**30,
            layer_major=layer_major,
            _wrap_store=functools.partial(
                ThrottledStore,
                read_bytes_per_s=arguments.read_mb_per_s * 1e6,
                write_bytes_per_s=arguments.write_mb_per_s * 1e6,
            ),
        )
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=num_micros,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        trainer.fit(model, DataLoader(data, batch_size=None))
    (first, read_before), (last, read_after) = watch.marks[NUM_UNTIMED_STEPS - 1], watch.marks[-1]
    count = len(watch.marks) - NUM_UNTIMED_STEPS
    return [(last - first) / count, (read_after - read_before) / count / 1e9]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--budget", type=float, default=0.75, help="max_ram_gb, in weights")
    parser.add_argument("--read-mb-per-s", type=float, default=200)
    parser.add_argument("--write-mb-per-s", type=float, default=200)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--directory", default=None)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("micro-batches  usual: s, GB read   layer-major: s, GB read   ratio of time")
    for num_micros in arguments.micro_batches:
        usual = measure(arguments, num_micros, layer_major=False)
        units = measure(arguments, num_micros, layer_major=True)
        print(
            f"{num_micros:13}  {usual[0]:8.2f} {usual[1]:9.3f}   {units[0]:14.2f} "
            f"{units[1]:9.3f}   {usual[0] / units[0]:13.2f}"
        )


if __name__ == "__main__":
    main()
