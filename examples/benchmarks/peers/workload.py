"""What every peer trains, and how its steps are measured; needs torch, transformers and psutil.

One process trains a Llama, initialised from one seed, on random tokens of one seed, in fp32 with
AdamW. Each peer's script builds its own machinery around `build_model` and `batches`, calls
`Meter.step_ended` after every optimizer step, and `Meter.report` at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LEARNING_RATE = 1e-5


def arguments(description: str | None) -> argparse.Namespace:
    """Return the options of all peers."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="the first one is not counted")
    parser.add_argument(
        "--checkpointing",
        action="store_true",
        help="recompute activations (megatrain decides itself)",
    )
    parser.add_argument("--directory", type=Path, required=True, help="where pages or swaps go")
    parser.add_argument("--max-ram-gb", type=float, default=2.0, help="budget, where there is one")
    parser.add_argument("--compression", default="False", help="optimizer_compression of megatrain")
    own = parser.add_argument_group("DeepSpeed alone")
    own.add_argument("--optimizer", choices=("cpu", "nvme"), default="nvme", help="where all is")
    own.add_argument("--sub-group-size", type=int, default=50_000_000)
    own.add_argument("--buffers", type=int, default=8)
    own.add_argument("--reuse-distance", type=int, default=0)
    own.add_argument("--max-in-cpu", type=int, default=0)
    own.add_argument("--aio-threads", type=int, default=2)
    own.add_argument("--pipeline", action="store_true", help="pipeline_read and pipeline_write")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return the model, of the same weights for every peer."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.width,
            intermediate_size=4 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=args.vocab,
            use_cache=False,
        )
    )


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield tokens `[batch, length]`, one for each step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        yield torch.randint(args.vocab, (args.batch, args.length), generator=generator)


class Meter:
    """Measures the steps of this process; its memory is sampled from outside, by `compare.py`.

    CPU time is that of all threads. Bytes are those that the kernel moved from and to the drive.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._marks: list[tuple[float, float, int, int]] = []
        self._losses: list[float] = []
        self._mark()

    def _mark(self) -> None:
        io = self._process.io_counters()
        self._marks.append((time.monotonic(), time.process_time(), io.read_bytes, io.write_bytes))

    def step_ended(self, loss: float) -> None:
        """Take note of a step and its loss."""
        self._losses.append(loss)
        self._mark()

    def report(self, **more: Any) -> None:
        """Print the figures as one line of JSON: medians over all steps but the first."""
        pairs = list(zip(self._marks[1:], self._marks[2:], strict=False))
        deltas = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairs]
        seconds, cpu_seconds, read, written = map(median, zip(*deltas, strict=True))
        figures = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "read_bytes": read,
            "written_bytes": written,
            "each_step_s": [delta[0] for delta in deltas],
            "counted": [self._marks[1][0], self._marks[-1][0]],
            "losses": self._losses,
            **more,
        }
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
