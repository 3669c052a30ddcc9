"""Train a small GPT with float32 and with coded Adam state, in pairs, and compare where they end.

Run: python examples/benchmarks/fidelity_char_gpt.py [--formats R1 dynamic] [--seeds 5] [--json]

Finished runs are kept in the file given by --cache, so that an interrupted benchmark goes on where
it stopped and more seeds can be added. What the columns mean is in paired_runs.py, in
[Note: paired runs].
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from char_gpt import CharGPT, Size, Text, rate_factor
from contenders import BASELINE, make_optimizer
from paired_runs import RunCache, collect, complete, show
from rich.progress import Progress
from torch import nn

VALIDATION_BATCHES = 24


def train(run: dict[str, Any], progress: Progress) -> float:
    """Train one model and return its validation loss.

    Args:
        run: What it depends on, as made by `main`.
        progress: Where to show how far it is.
    """
    torch.manual_seed(run["seed"])
    size = Size(width=run["width"], num_layers=run["layers"])
    text = Text(size)
    model = CharGPT(size, text.vocabulary)
    optimizer = make_optimizer(
        run["format"],
        model.parameters(),
        lr=run["lr"],
        betas=(0.9, run["beta2"]),
        weight_decay=0.1,
        seed=run["seed"],
    )
    generator = torch.Generator().manual_seed(run["seed"])
    task = progress.add_task(
        f"{run['format']} beta2 {run['beta2']:g} seed {run['seed']}", total=run["steps"]
    )
    for step in range(run["steps"]):
        optimizer.param_groups[0]["lr"] = run["lr"] * rate_factor(step, run["steps"], 50)
        model.loss(text.batch(generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.advance(task)
    progress.remove_task(task)
    return text.validation_loss(model, VALIDATION_BATCHES)


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["dynamic"], metavar="NAME")
    parser.add_argument("--beta2", nargs="+", type=float, default=[0.999, 0.95])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cache", type=Path, default=None, help="file of finished runs")
    parser.add_argument("--threads", type=int, default=None, help="of torch")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    runs = [
        {
            "format": format,
            "beta2": beta2,
            "seed": seed,
            **{key: getattr(options, key) for key in ("steps", "lr", "width", "layers")},
        }
        for seed in range(options.seeds)
        for beta2 in options.beta2
        for format in [BASELINE, *options.formats]
    ]
    cache = RunCache(options.cache)
    complete(cache, runs, train)

    comparisons = collect(cache, runs, options.formats)
    show(f"Character GPT, {options.steps} steps", comparisons, as_data=options.json)


if __name__ == "__main__":
    main()
