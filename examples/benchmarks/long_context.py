"""Long sequences, large vocabularies: peak memory and time, plain Lightning against "megatrain".

    python examples/benchmarks/long_context.py --lengths 1024 4096 16384 32768 --limit-gb 2.0
    python examples/benchmarks/long_context.py --lengths 2048 --width 32 --vocabs 8000 32000 128000

A small Llama is trained for two steps on one sequence, each figure in a process of its own. None
may take more than `--limit-gb` beside what it holds before training: the kernel refuses the rest
(RLIMIT_DATA), as a machine of that size would. "plain" keeps every activation, "checkpointed" runs
transformers' gradient checkpointing; both make the logits of all tokens at once. Memory is the peak
of resident memory above that before training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt

MODES = ("plain", "checkpointed", "megatrain")
NUM_STEPS = 2


class Times(Callback):
    """Notes when each batch ends."""

    def __init__(self) -> None:
        self.marks = [time.perf_counter()]

    def on_train_batch_end(self, *_: Any) -> None:
        """Note a batch."""
        self.marks.append(time.perf_counter())


class Plain(LightningModule):
    """The model as transformers runs it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of tokens `[1, length]`."""
        del batch_idx
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Chunked(mt.CausalLMModule):
    """The same, with the loss in chunks, on batches that are tensors."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of tokens `[1, length]`."""
        return super().training_step({"input_ids": batch, "labels": batch}, batch_idx)


def llama(args: argparse.Namespace, vocab: int) -> LlamaForCausalLM:
    """Return a Llama whose positions reach to the longest sequence."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.width,
            intermediate_size=4 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=vocab,
            max_position_embeddings=max(args.lengths),
            use_cache=False,
        )
    )


def measure(
    args: argparse.Namespace, mode: str, length: int, vocab: int, root: Path
) -> dict[str, Any]:
    """Train under the limit; return peak memory in bytes, seconds per step and the last loss."""
    module: LightningModule
    model = llama(args, vocab)
    options: dict[str, Any] = {}
    if mode == "megatrain":
        module = Chunked(model, learning_rate=1e-4)
        options["strategy"] = mt.MegaTrainStrategy(root / "pages", max_ram_gb=args.max_ram_gb)
    else:
        module = Plain(model)
        if mode == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
    times = Times()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        default_root_dir=root,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    tokens = torch.randint(vocab, (NUM_STEPS, length))
    process = psutil.Process()
    before = process.memory_info()
    limit = before.data + round(args.limit_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        trainer.fit(module, DataLoader(tokens, 1))  # type: ignore[arg-type]
    except (MemoryError, RuntimeError) as error:
        if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        return {"died": str(error).splitlines()[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": peak - before.rss, "seconds": times.marks[-1] - times.marks[-2]}


def run_apart(args: argparse.Namespace, mode: str, length: int, vocab: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="long-context-") as root:
        one = ["--one", mode, str(length), str(vocab), root]
        command = [sys.executable, __file__, *sys.argv[1:], *one]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every length and mode, show a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[32000])
    parser.add_argument("--limit-gb", type=float, default=2.0, help="for training, in GiB")
    parser.add_argument("--max-ram-gb", type=float, default=0.5, help="of the strategy")
    parser.add_argument("--directory", type=Path, help="where pages go; a temporary one if absent")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        logging.disable(logging.INFO)
        warnings.filterwarnings("ignore")
        mode, length, vocab, root = args.one
        found = measure(args, mode, int(length), int(vocab), Path(root))
        sys.stdout.write(json.dumps(found) + "\n")
        return
    table = Table(box=box.SIMPLE_HEAD, title=f"limit {args.limit_gb} GiB")
    for name in ("tokens", "vocabulary", *args.modes):
        table.add_column(name, justify="right")
    figures = []
    for length, vocab in itertools.product(args.lengths, args.vocabs):
        row = {mode: run_apart(args, mode, length, vocab) for mode in args.modes}
        figures.append({"length": length, "vocab": vocab, **row})
        table.add_row(str(length), str(vocab), *map(_cell, row.values()))
    Console(width=100).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


def _cell(found: dict[str, Any]) -> str:
    if "died" in found:
        return "out of memory"
    return f"{found['bytes'] / 2**20:.0f} MiB, {found['seconds']:.1f} s"


if __name__ == "__main__":
    main()
