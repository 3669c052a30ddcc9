"""Fine-tune SmolLM2-135M with float32 and with coded Adam state, in pairs, and compare the ends.

Run: python examples/benchmarks/fidelity_smollm2.py --cache runs.jsonl [--formats dynamic] [--json]

It takes hours on a few cores. Each run is written to the cache file when it finishes, and a run
that is already there is not repeated: stop the benchmark at will and start it again, or let several
processes share the work with --only. What the columns mean is in paired_runs.py, in
[Note: paired runs].

It needs: pip install 'mt-lightning[examples]'
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from char_gpt import rate_factor
from contenders import BASELINE, make_optimizer
from paired_runs import RunCache, collect, complete, show
from rich.progress import Progress
from smollm2 import load, training_batches, validation_loss
from torch import nn


def train(run: dict[str, Any], progress: Progress) -> float:
    """Fine-tune once and return the validation loss.

    Args:
        run: What it depends on, as made by `main`.
        progress: Where to show how far it is.
    """
    torch.manual_seed(run["seed"])
    model = load()
    if run["checkpointing"]:
        model.gradient_checkpointing_enable()
    optimizer = make_optimizer(
        run["format"],
        model.parameters(),
        lr=run["lr"],
        betas=(0.9, run["beta2"]),
        weight_decay=0.01,
        seed=run["seed"],
    )
    batches = training_batches(run["seed"])
    task = progress.add_task("", total=run["steps"])
    for step in range(run["steps"]):
        optimizer.param_groups[0]["lr"] = run["lr"] * rate_factor(step, run["steps"], 10)
        batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        name = f"{run['format']} beta2 {run['beta2']:g} seed {run['seed']}"
        progress.update(task, advance=1, description=f"{name} loss {loss.item():.3f}")
    progress.remove_task(task)
    model.eval()
    return validation_loss(model, run["validation_batches"])


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["dynamic"], metavar="NAME")
    parser.add_argument("--beta2", nargs="+", type=float, default=[0.999])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--validation-batches", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--cache", type=Path, required=True, help="file of finished runs")
    parser.add_argument("--only", type=int, default=None, help="this seed alone; prints no table")
    parser.add_argument("--threads", type=int, default=None, help="of torch")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    shared = ("steps", "lr", "validation_batches", "checkpointing")
    runs = [
        {
            "format": format,
            "beta2": beta2,
            "seed": seed,
            **{key: getattr(options, key) for key in shared},
        }
        for seed in range(options.seeds)
        for beta2 in options.beta2
        for format in [BASELINE, *options.formats]
    ]
    cache = RunCache(options.cache)
    mine = [run for run in runs if options.only in (None, run["seed"])]
    complete(cache, mine, train)
    if options.only is not None:
        return

    comparisons = collect(cache, runs, options.formats)
    show(f"SmolLM2-135M, {options.steps} steps", comparisons, as_data=options.json)


if __name__ == "__main__":
    main()
