"""Time of a step when what units save for backward is kept, and when it is computed again.

    python examples/benchmarks/recompute.py --steps 10
    python examples/benchmarks/recompute.py --size small --steps 40 --json

A Llama with random weights, everything in RAM, is trained by plain Lightning and by megatrain with
`recompute` True, "auto" and False. The trainers run in turn, a step each, in one process, so that
whatever else the machine does falls on all of them alike. Medians are taken of steps, and of the
ratios to the plain step of the same turn. The first turns are not timed.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt

NUM_UNTIMED_STEPS = 3
SIZES = {
    # hidden size, layers, vocabulary
    "large": (768, 12, 16000),  # 107 million parameters
    "small": (256, 6, 4000),  # 7 million
}
MODES = {"plain": None, "True": True, "auto": "auto", "False": False}


class Llama(pl.LightningModule):
    """A Llama with random weights."""

    def __init__(self, size: str, num_tokens: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, num_layers, vocab = SIZES[size]
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=num_layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            max_position_embeddings=num_tokens,
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.network = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of predicting each next token."""
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return fused AdamW over everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Turns(pl.Callback):
    """Lets another trainer take a step after each step."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []
        self._begin = (0.0, 0.0)

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin to measure."""
        self._begin = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop, and give the turn away."""
        self.step_s.append(time.perf_counter() - self._begin[0])
        self.cpu_s.append(time.process_time() - self._begin[1])
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()


class Trained(greenlet):
    """One of the runs.

    Args:
        arguments: Those of the command.
        mode: What `recompute` is, None for plain Lightning.
        directory: Where pages go.
    """

    def __init__(self, arguments: argparse.Namespace, mode: Any, directory: str) -> None:
        super().__init__()
        self.turns = Turns()
        self.model = Llama(arguments.size, arguments.tokens)
        self.strategy: Any = "auto"
        if mode is not None:
            self.strategy = mt.MegaTrainStrategy(
                offload_dir=directory, max_ram_gb=arguments.max_ram_gb, recompute=mode
            )
        self._directory = directory
        self._num_steps = NUM_UNTIMED_STEPS + arguments.steps
        torch.manual_seed(1)
        vocab = SIZES[arguments.size][2]
        self._batches = torch.randint(vocab, (self._num_steps, arguments.rows, arguments.tokens))

    def run(self) -> None:  # type: ignore[override]
        """Train."""
        trainer = pl.Trainer(
            strategy=self.strategy,
            accelerator="cpu",
            max_steps=self._num_steps,
            callbacks=[self.turns],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self._directory,
        )
        trainer.fit(self.model, DataLoader(self._batches, batch_size=None))  # pyright: ignore[reportArgumentType]


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run all in turn; return seconds, CPU seconds and ratios per step, and what was kept."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        runs = {
            name: Trained(arguments, MODES[name], f"{directory}/{name}") for name in arguments.modes
        }
        while not all(run.dead for run in runs.values()):
            for run in runs.values():
                if not run.dead:
                    run.switch()
        found = {}
        plain = runs["plain"].turns
        for name, run in runs.items():
            timed, cpu = run.turns.step_s[NUM_UNTIMED_STEPS:], run.turns.cpu_s[NUM_UNTIMED_STEPS:]
            both = zip(timed, plain.step_s[NUM_UNTIMED_STEPS:], strict=True)
            cpu_both = zip(cpu, plain.cpu_s[NUM_UNTIMED_STEPS:], strict=True)
            found[name] = {
                "step_s": statistics.median(timed),
                "cpu_s": statistics.median(cpu),
                "ratio": statistics.median(mine / other for mine, other in both),
                "cpu_ratio": statistics.median(mine / other for mine, other in cpu_both),
                "equal": all(
                    torch.equal(a, b)
                    for a, b in zip(
                        run.model.parameters(), runs["plain"].model.parameters(), strict=True
                    )
                ),
            }
            if name != "plain":
                stats = run.strategy.engine.stats
                found[name]["kept"] = f"{stats.units_kept} of {stats.units_run}"
                found[name]["graph_bytes"] = stats.graph_peak_bytes
        return found


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--rows", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each run")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--max-ram-gb", type=float, default=8.0)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.modes = ["plain", *(mode for mode in arguments.modes if mode != "plain")]
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = measure(arguments)
    if arguments.json:
        print(json.dumps({"arguments": vars(arguments), "runs": found}))
        return
    print("recompute    s/step  to plain  CPU s  to plain  same bits  graphs kept")
    for name, row in found.items():
        size = f"{row['kept']}, {row['graph_bytes'] / 2**20:.0f} MiB" if "kept" in row else ""
        print(
            f"{name:10} {row['step_s']:8.3f} {row['ratio']:9.3f} {row['cpu_s']:6.2f} "
            f"{row['cpu_ratio']:9.3f}  {row['equal']!s:9}  {size}"
        )


if __name__ == "__main__":
    main()
