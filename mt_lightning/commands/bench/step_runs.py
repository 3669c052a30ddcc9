"""The contestants of `megatrain bench step`: a Llama trained by plain Lightning and on pages."""

from __future__ import annotations

import functools
import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from mt_lightning.engine.options import Durability
from mt_lightning.engine.plan import Plan
from mt_lightning.errors import BudgetError
from mt_lightning.strategy import MegaTrainStrategy
from mt_lightning.tiers.doubles import ThrottledStore

_FAR_TOO_SMALL_GB = 1e-6
_HEAD_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained.

    Attributes:
        width: Of the model.
        num_layers: Its decoder layers.
        vocab: Its vocabulary.
        batch: Sequences of a step.
        length: Tokens of a sequence.
    """

    width: int
    num_layers: int
    vocab: int
    batch: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a drive is made; infinite for as fast as it is.

    Attributes:
        read_bytes_per_s: Rate of reads.
        write_bytes_per_s: Rate of writes.
    """

    read_bytes_per_s: float = math.inf
    write_bytes_per_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What some steps took, all but the first.

    Attributes:
        seconds: Of each step.
        cpu_seconds: Processor time of each, all threads.
        update_cpu_s: Processor time of the optimizer in a step; 0 on pages, where it runs beside.
        read_bytes: Read in a step.
        written_bytes: Written in a step.
        stalls: Seconds that a step waited, by reason.
        recomputed: Whether units ran again in backward.
        plan: What goes where, None for plain Lightning.
        losses: Of all steps.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    update_cpu_s: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    stalls: dict[str, float]
    recomputed: bool
    plan: Plan | None
    losses: list[float]


class _Llama(LightningModule):
    def __init__(self, size: Size, *, recompute: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        num_heads = max(1, size.width // _HEAD_WIDTH)
        self.network = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=size.width,
                intermediate_size=4 * size.width,
                num_hidden_layers=size.num_layers,
                num_attention_heads=num_heads,
                num_key_value_heads=num_heads,
                vocab_size=size.vocab,
                use_cache=False,
            )
        )
        if recompute:
            self.network.gradient_checkpointing_enable({"use_reentrant": False})
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.network(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _TimedStep(Callback):
    """Notes the processor time of the optimizer's own part of a plain step."""

    def __init__(self) -> None:
        self.cpu_seconds: list[float] = []
        self._starts: list[float] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._starts.append(time.process_time()))
            optimizer.register_step_post_hook(self._ended)

    def _ended(self, *_: Any) -> None:
        self.cpu_seconds.append(time.process_time() - self._starts.pop())


class _Marks(Callback):
    """Notes time, processor time and counters at the end of each step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.stats: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.times.append((time.perf_counter(), time.process_time()))
        strategy = trainer.strategy
        if isinstance(strategy, MegaTrainStrategy) and strategy.engine is not None:
            self.stats.append(strategy.engine.stats.snapshot())


def run_plain(size: Size, num_steps: int, root: Path, *, recompute: bool) -> Turn:
    """Train by plain Lightning.

    Args:
        size: What.
        num_steps: Steps, the first of which is not timed.
        root: A directory for Lightning.
        recompute: Whether layers run again in backward.
    """
    timed = _TimedStep()
    marks, losses = _fit(size, num_steps, root, "auto", [timed], recompute=recompute)
    update_cpu_s = _mean(timed.cpu_seconds[1:])
    return _turn(marks, losses, update_cpu_s, recomputed=recompute, plan=None)


def run_paged(
    size: Size,
    num_steps: int,
    root: Path,
    *,
    max_ram_gb: float | None,
    durability: Durability,
    speed: Speed,
) -> Turn:
    """Train on pages.

    Args:
        size: What.
        num_steps: Steps, the first of which is not timed.
        root: The directory under which pages lie.
        max_ram_gb: The budget, None for the default.
        durability: When steps are committed.
        speed: How fast the drive is made.

    Raises:
        BudgetError: The budget is too small.
    """
    strategy = MegaTrainStrategy(
        max_ram_gb=max_ram_gb,
        durability=durability,
        _wrap_store=functools.partial(
            ThrottledStore,
            read_bytes_per_s=speed.read_bytes_per_s,
            write_bytes_per_s=speed.write_bytes_per_s,
        )
        if speed != Speed()
        else None,
    )
    marks, losses = _fit(size, num_steps, root, strategy, [], recompute=False)
    assert strategy.engine is not None
    plan, stats = strategy.engine.plan, marks.stats[-1]
    recomputed = plan is not None and (
        plan.recompute is True or stats["units_kept"] < stats["units_run"]
    )
    return _turn(marks, losses, 0.0, recomputed=recomputed, plan=plan)


def smallest_gb(size: Size, root: Path, durability: Durability) -> float:
    """Return the smallest budget, which the refusal of a far too small one names."""
    try:
        run_paged(
            size,
            1,
            root,
            max_ram_gb=_FAR_TOO_SMALL_GB,
            durability=durability,
            speed=Speed(),
        )
    except BudgetError as error:
        return error.smallest_gb or 0.0
    raise AssertionError("a budget of a kilobyte was not refused")


def _fit(
    size: Size,
    num_steps: int,
    root: Path,
    strategy: Any,
    callbacks: list[Callback],
    *,
    recompute: bool,
) -> tuple[_Marks, list[float]]:
    marks = _Marks()
    tokens = torch.randint(
        size.vocab,
        (num_steps * size.batch, size.length),
        generator=torch.Generator().manual_seed(0),
    )
    with _quiet():
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            max_steps=num_steps,
            default_root_dir=root,
            callbacks=[marks, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = _Llama(size, recompute=recompute)
        trainer.fit(model, DataLoader(tokens, size.batch))  # type: ignore[arg-type]
    return marks, [float(loss) for loss in model.losses]


def _turn(
    marks: _Marks, losses: list[float], update_cpu_s: float, *, recomputed: bool, plan: Plan | None
) -> Turn:
    pairs = list(zip(marks.times, marks.times[1:], strict=False))
    moved = {}
    if len(marks.stats) > 1:
        first, last = marks.stats[0], marks.stats[-1]
        moved = {key: (last[key] - first[key]) / (len(marks.stats) - 1) for key in first}
    return Turn(
        seconds=[after[0] - before[0] for before, after in pairs],
        cpu_seconds=[after[1] - before[1] for before, after in pairs],
        update_cpu_s=update_cpu_s,
        read_bytes=moved.get("bytes_read", 0.0),
        written_bytes=moved.get("bytes_written", 0.0),
        stalls={key: value for key, value in moved.items() if key.startswith("stall_")},
        recomputed=recomputed,
        plan=plan,
        losses=losses,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's and our own notes to a run of a few steps out of the table."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "mt_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
