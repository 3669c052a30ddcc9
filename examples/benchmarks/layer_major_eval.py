"""Time and bytes of prediction and generation, one batch after the other and several together.

    python examples/benchmarks/layer_major_eval.py --read-mb-per-s 200 --batches 4 16

The model is a small Llama with random weights and a memory budget below its weights, on a slowed
down drive. The first batch runs alone in both orders and is not timed. The orders take turns.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt
from mt_lightning.tiers.doubles import ThrottledStore

VOCAB_SIZE = 512


class Predictor(pl.LightningModule):
    """A Llama that scores a batch, or goes on with it."""

    def __init__(self, arguments: argparse.Namespace, num_new: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=arguments.width,
            intermediate_size=4 * arguments.width,
            num_hidden_layers=arguments.layers,
            num_attention_heads=8,
        )
        self.model = LlamaForCausalLM(config)
        self.num_new = num_new

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss, or the tokens with `num_new` more."""
        if not self.num_new:
            return self.model(batch, labels=batch).loss
        return self.model.generate(  # type: ignore[operator]
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=self.num_new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )


class Watch(pl.Callback):
    """Notes time and bytes read when the first batch has ended, and when all have."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def on_predict_batch_end(self, trainer: Any, *_: Any) -> None:
        """Note them after the first batch."""
        if not self.marks:
            self.on_predict_epoch_end(trainer)

    def on_predict_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Note them in the end."""
        self.marks.append((time.perf_counter(), trainer.strategy.engine.stats.bytes_read))


def measure(
    arguments: argparse.Namespace, num_batches: int, num_new: int, *, layer_major: bool
) -> tuple[float, float, Any]:
    """Return seconds and GB read after the first batch, and what was predicted."""
    model = Predictor(arguments, num_new)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    shape = (1 + num_batches, arguments.rows, arguments.tokens)
    data = torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))
    watch = Watch()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        strategy = mt.MegaTrainStrategy(
            offload_dir=directory,
            max_ram_gb=arguments.budget * weight_bytes / 2**30,
            layer_major=layer_major,
            _wrap_store=functools.partial(
                ThrottledStore,
                read_bytes_per_s=arguments.read_mb_per_s * 1e6,
                write_bytes_per_s=1e12,
            ),
        )
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        found = trainer.predict(model, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    (first, read_before), (last, read_after) = watch.marks
    return last - first, (read_after - read_before) / 1e9, found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a row")
    parser.add_argument("--new-tokens", type=int, default=8, help="generated tokens")
    parser.add_argument("--budget", type=float, default=0.5, help="max_ram_gb, in weights")
    parser.add_argument("--read-mb-per-s", type=float, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", default=None)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("what      batches  usual: s, GB read   together: s, GB read   ratio of time")
    for num_new in (0, arguments.new_tokens):
        for num_batches in arguments.batches:
            run = functools.partial(measure, arguments, num_batches, num_new)
            both = [
                (run(layer_major=False), run(layer_major=True)) for _ in range(arguments.repeats)
            ]
            for usual, together in both:
                assert all(map(torch.equal, usual[2], together[2]))
            medians = [statistics.median(each[i][0] for each in both) for i in (0, 1)]
            what = "generate" if num_new else "predict"
            print(
                f"{what:9} {num_batches:7}  {medians[0]:8.2f} {both[0][0][1]:9.3f}  "
                f"{medians[1]:11.2f} {both[0][1][1]:9.3f}   {medians[0] / medians[1]:13.2f}"
            )


if __name__ == "__main__":
    main()
