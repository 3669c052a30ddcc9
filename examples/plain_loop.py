"""A training loop of plain PyTorch, with weights, gradients and optimizer state on disk.

Run: python examples/plain_loop.py [--fast]
"""

from __future__ import annotations

import argparse
import time

import rich
import torch
from torch import nn
from torch.nn import functional

import mt_lightning as mt
from mt_lightning.callbacks.tables import plan_table


def main() -> None:
    """Learn to count in steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a model that trains in a second")
    fast = parser.parse_args().fast

    torch.manual_seed(0)
    width = 32 if fast else 512
    layer = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
    layers = [nn.TransformerEncoderLayer(width, **layer) for _ in range(2 if fast else 12)]
    model = nn.Sequential(nn.Embedding(256, width), *layers, nn.Linear(width, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_steps = 5 if fast else 100

    # The one line that is not of a plain loop.
    with mt.page(model, optimizer, max_ram_gb=0.25) as paged:
        rich.print(plan_table(paged.plan))
        start = time.perf_counter()
        for step in range(num_steps):
            first, stride = torch.randint(256, (2, 16, 1))
            tokens = (first + stride * torch.arange(2)) % 256
            loss = functional.cross_entropy(model(tokens[:, :1])[:, 0], tokens[:, 1])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(f"step {step}: loss {loss.item():.3f}")
        took_s = time.perf_counter() - start
        print(f"{num_steps} steps took {took_s:.1f} s, {paged.stats.ram_peak_bytes / 1e6:.0f} MB")
    print(f"the model is an ordinary one again: {sum(p.numel() for p in model.parameters()):,}")


if __name__ == "__main__":
    main()
