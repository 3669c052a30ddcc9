"""Train a small GPT with gradients that wait as fp32 and as bfloat16, and compare where they end.

Run: python examples/benchmarks/gradient_dtype.py [--seeds 1 2 3 4 5] [--micros 1 8] [--steps 100]

Each pair has the same weights, batches and seed; the loss is that of text that was not trained on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Literal

import torch
from char_gpt import CharGPT, Size, Text
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import mt_lightning as mt

SIZE = Size(context=64, batch_size=16)
VALIDATION_BATCHES = 32


class Paged(CharGPT):
    """Looks positions up, as a module whose weights come and go has to be used."""

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of predicting each next character of `[batch, context + 1]`."""
        x = self.tokens(batch[:, :-1]) + self.positions(torch.arange(batch.shape[1] - 1))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(dtype: Literal["fp32", "bf16"], seed: int, micros: int, num_steps: int) -> float:
    """Train one model and return its validation loss."""
    torch.manual_seed(seed)
    text = Text(SIZE)
    model = Paged(SIZE, text.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    with (
        tempfile.TemporaryDirectory() as root,
        mt.page(model, optimizer, offload_dir=root, max_ram_gb=0.5, gradient_dtype=dtype),
    ):
        for _ in range(num_steps):
            for part in text.batch(generator).chunk(micros):
                (model.loss(part) / micros).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return text.validation_loss(model, VALIDATION_BATCHES)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--micros", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    console = Console()
    table = Table("micro-batches", "seed", "fp32", "bf16", "difference")
    for micros in args.micros:
        losses: list[float] = []
        differences: list[float] = []
        for seed in args.seeds:
            whole = train("fp32", seed, micros, args.steps)
            half = train("bf16", seed, micros, args.steps)
            losses.append(whole)
            differences.append(half - whole)
            row = f"{whole:.7f}", f"{half:.7f}", f"{half - whole:+.1e}"
            console.log(micros, seed, *row)
            table.add_row(str(micros), str(seed), *row)
        mean, spread = statistics.mean(differences), statistics.pstdev(losses)
        table.add_row(str(micros), "all", "", f"seeds spread {spread:.1e}", f"{mean:+.1e}")
    console.print(table)


if __name__ == "__main__":
    main()
