"""What it costs that every step is committed: durability="step" against "checkpoint".

    python examples/benchmarks/durable_step.py --budget fits
    python examples/benchmarks/durable_step.py --budget smallest --json durable.json

Both train the same Llama on the same data. They take turns, a few steps each, in one process, so
that what else the machine does meets both. Medians over all steps but the first of each turn, of
the time and of the processor time of all threads; the latter depends less on what else runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt

MODES = ("step", "checkpoint")


class Llama(LightningModule):
    """A Llama of the given width, in float32."""

    def __init__(self, width: int, num_layers: int, vocab: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=num_layers,
                num_attention_heads=8,
                num_key_value_heads=8,
                vocab_size=vocab,
                use_cache=False,
            )
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch of tokens `[batch, length]`."""
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Times(Callback):
    """Notes how long each batch takes, from one end to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._last: tuple[float, float] | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        """Note a batch."""
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.seconds.append(now[0] - self._last[0])
            self.cpu_seconds.append(now[1] - self._last[1])
        self._last = now


def smallest_gb(args: argparse.Namespace, root: Path) -> float:
    """Return the smallest budget, which the refusal of a far too small one names."""
    try:
        turn(args, "step", 1e-6, root, num_steps=1)
    except mt.BudgetError as error:
        return error.smallest_gb or 0.0
    raise RuntimeError("a budget of a kilobyte was not refused")


def turn(
    args: argparse.Namespace, durability: str, max_ram_gb: float, root: Path, *, num_steps: int
) -> dict[str, Any]:
    """Train for some steps; return their times, the bytes they wrote and the losses."""
    times = Times()
    strategy = mt.MegaTrainStrategy(max_ram_gb=max_ram_gb, durability=durability)  # type: ignore[arg-type]
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=num_steps,
        default_root_dir=root,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(
        args.vocab,
        (num_steps * args.batch, args.length),
        generator=torch.Generator().manual_seed(0),
    )
    trainer.fit(Llama(args.width, args.layers, args.vocab), DataLoader(tokens, args.batch))  # type: ignore[arg-type]
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    plan = strategy.engine.plan
    return {
        "seconds": times.seconds[1:],
        "cpu_seconds": times.cpu_seconds[1:],
        "step_bytes": plan.written_bytes,
        "commit_bytes": plan.commit_bytes,
        "num_params": plan.num_params,
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--budget", choices=("fits", "smallest"), default="fits")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each turn")
    parser.add_argument("--directory", type=Path, help="where pages go; a temporary one if absent")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    cpu_seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    facts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        budget = 4.0 if args.budget == "fits" else smallest_gb(args, Path(root))
        for _ in range(args.turns):
            for mode in MODES:
                facts[mode] = turn(args, mode, budget, Path(root), num_steps=args.steps)
                seconds[mode] += facts[mode].pop("seconds")
                cpu_seconds[mode] += facts[mode].pop("cpu_seconds")
    medians = {mode: median(values) for mode, values in seconds.items()}
    cpu = {mode: median(values) for mode, values in cpu_seconds.items()}
    table = Table(title=f"{facts['step']['num_params'] / 1e6:.1f} M parameters, {budget:.3f} GiB")
    for name in ("durability", "step", "ratio", "CPU", "ratio", "per step", "per commit"):
        table.add_column(name, justify="right")
    for mode in MODES:
        table.add_row(
            mode,
            f"{medians[mode]:.3f} s",
            f"{medians[mode] / medians['checkpoint'] - 1:+.1%}",
            f"{cpu[mode]:.3f} s",
            f"{cpu[mode] / cpu['checkpoint'] - 1:+.1%}",
            f"{facts[mode]['step_bytes'] / 2**20:.1f} MiB",
            f"{facts[mode]['commit_bytes'] / 2**20:.1f} MiB",
        )
    Console().print(table)
    if args.json is not None:
        figures = {"settings": {k: str(v) for k, v in vars(args).items()}, "budget_gib": budget}
        for mode in MODES:
            taken = {"seconds": seconds[mode], "cpu_seconds": cpu_seconds[mode]}
            figures[mode] = facts[mode] | taken
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
