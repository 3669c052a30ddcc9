"""A small language model as users write them, and one training run of it with its counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

NUM_TOKENS = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(
            self.query(y), self.key(y), self.value(y), is_causal=True
        )
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(pl.LightningModule):
    def __init__(self, width: int, num_layers: int, vocab: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(NUM_TOKENS, width))
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Counters(pl.Callback):
    """Notes the bytes moved after each micro-batch, once everything under way has ended."""

    def __init__(self) -> None:
        self.start = (0, 0)
        self.after: list[tuple[int, int]] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = self._read(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        assert self._read(trainer) == (self.after[-1] if self.after else self.start)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.after.append(self._read(trainer))

    def _read(self, trainer: pl.Trainer) -> tuple[int, int]:
        wait_for_all(trainer)
        stats = trainer.strategy.engine.stats
        return stats.bytes_read, stats.bytes_written


def wait_for_all(trainer: pl.Trainer) -> None:
    """Wait for jobs and reads without retiring them, which would change what comes next."""
    run = trainer.strategy.engine.live.run
    for job in list(run.worker._pending):
        job.wait()
    for entry in list(run.pool._entries.values()):
        if entry.read is not None:
            entry.read._finished.wait()


@dataclass(kw_only=True)
class Moved:
    """Bytes read and written since the end of set-up; the last item is after the end."""

    bytes: list[tuple[int, int]]
    stats: dict[str, float] = field(default_factory=dict)
    schedule: str = ""


def train(
    directory: Path,
    *,
    budget_bytes: int,
    depth: int | None,
    deferred: bool,
    micro_batches: int,
    num_steps: int,
    width: int = 64,
    num_layers: int = 5,
    vocab: int = 300,
    counters: Counters | None = None,
    **strategy: Any,
) -> Moved:
    """Train `GPT` on random tokens."""
    from mt_lightning import MegaTrainStrategy

    torch.manual_seed(0)
    model = GPT(width, num_layers, vocab)
    num_batches = num_steps * micro_batches
    data = torch.randint(0, vocab, (num_batches, NUM_TOKENS + 1))
    counters = counters or Counters()
    paged = MegaTrainStrategy(
        offload_dir=directory / "pages",
        max_ram_gb=budget_bytes / 2**30,
        _depth=depth,
        **{"durability": "step", "layer_major": False, **strategy},
    )
    trainer = pl.Trainer(
        strategy=paged,
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=directory,
        logger=False,
        callbacks=[counters],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=micro_batches,
        gradient_clip_val=0.5 if deferred else None,
    )
    trainer.fit(model, DataLoader(data, batch_size=1))
    assert trainer.global_step == num_steps
    engine = paged.engine
    assert engine is not None
    assert engine.plan is not None
    stats = engine.stats
    read, written = counters.start
    totals = [*counters.after, (stats.bytes_read, stats.bytes_written)]
    moved = [(a - read, b - written) for a, b in totals]
    return Moved(bytes=moved, stats=stats.snapshot(), schedule=engine.plan.schedule)
