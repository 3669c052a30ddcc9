"""Record what each optimizer step of a paged fit costs, and the whole run at its end."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mt_lightning.callbacks.bottleneck import Advice, advise
from mt_lightning.callbacks.memory import MemorySampler
from mt_lightning.callbacks.meter import StepMeter, StepRecord
from mt_lightning.callbacks.situation import situation
from mt_lightning.engine.engine import Engine
from mt_lightning.engine.plan import Plan
from mt_lightning.planning.outlook import Outlook
from mt_lightning.planning.timing import StepTime
from mt_lightning.strategy import MegaTrainStrategy

log = logging.getLogger(__name__)

_WARM_UP_STEPS = 2
_FEW_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a fit has cost."""

    plan: Plan
    """What was to go where."""
    records: Sequence[StepRecord]
    """One per optimizer step; never empty."""
    paging_peak_bytes: int
    """The most memory of paging."""
    graph_peak_bytes: int
    """The most memory of graphs that were kept until backward."""
    units_run: int
    """Units that ran in the last forward pass; 0 where no graph may be kept."""
    units_kept: int
    """Those of them that backward did not run again."""
    process_peak_bytes: int
    """The most anonymous and shared memory of the whole process."""
    read_bytes_per_step: float
    written_bytes_per_step: float
    expected_read_bytes: int
    """Bytes that a step reads, as the engine predicts them."""
    expected_written_bytes: int
    """Bytes that a step writes, as the engine predicts them."""
    planned_ram_bytes: int
    """The most memory of paging, as the planner counts it."""
    planned: StepTime | None
    """The least time of a step by the profile of this machine; None where it was not measured, or
    the batches hold no tokens."""
    advice: Advice
    """What bounds the speed, and what would move it."""


class PagingRecorder(Callback, ABC):
    """Follows a fit under strategy "megatrain"; says so once and does nothing under another."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._engine: Engine | None = None
        self._meter: StepMeter | None = None
        self._outlook: Outlook | None = None
        self._sampler = MemorySampler()
        self._bytes_before = (0, 0)
        self._has_told = False

    @abstractmethod
    def on_begin(self, trainer: Trainer, plan: Plan) -> None:
        """Act on the start of a fit."""

    @abstractmethod
    def on_step(self, trainer: Trainer, pl_module: LightningModule, record: StepRecord) -> None:
        """Act on a finished optimizer step."""

    @abstractmethod
    def on_close(self, trainer: Trainer, cost: RunCost) -> None:
        """Act on the end of a fit of at least one step, by success or by an error."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to record."""
        engine = self._engine = paging_engine(trainer)
        if engine is None:
            if not self._has_told:
                name = type(self).__name__
                log.info("%s: the strategy is not megatrain; there is nothing to record.", name)
                self._has_told = True
            return
        assert engine.plan is not None
        self.records = []
        stats = engine.stats
        self._bytes_before = (stats.bytes_read, stats.bytes_written)
        self._outlook = trainer.strategy.outlook  # type: ignore[attr-defined]
        self._meter = StepMeter(lambda: engine.stats, trainer.global_step)
        self._sampler.start()
        self.on_begin(trainer, engine.plan)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the counters."""
        if self._meter is not None:
            self._meter.start_batch()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the record of a finished optimizer step."""
        if self._meter is None:
            return
        record = self._meter.end_batch(batch, trainer.global_step)
        if record is not None:
            self.records.append(record)
            self.on_step(trainer, pl_module, record)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that what follows is not the cost of a training step."""
        if self._meter is not None:
            self._meter.start_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that training goes on."""
        if self._meter is not None:
            self._meter.end_evaluation()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum up; all updates have been written by now."""
        self._close(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Sum up what has been done."""
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        engine, self._engine, self._meter = self._engine, None, None
        if engine is None:
            return
        self._sampler.stop()
        if self.records:
            self.on_close(trainer, self._cost(trainer, engine))
        self._outlook = None

    def _cost(self, trainer: Trainer, engine: Engine) -> RunCost:
        assert engine.plan is not None
        stats = engine.stats
        num_read, num_written = self._bytes_before
        num_steps = len(self.records)
        # Every step's update has been written, so the total is exact. Reads are not: the first
        # steps fill an empty pool, and validation reads too.
        later = self.records[_WARM_UP_STEPS:]
        steady = [record for record in later if not record.spans_evaluation]
        read_per_step = (stats.bytes_read - num_read) / num_steps
        if num_steps >= _FEW_STEPS and steady:
            read_per_step = fmean(record.read_bytes for record in steady)
        expected_read, expected_written = engine.expected_bytes_per_step()
        # What was open at the start, the order of batches, is known now.
        assert self._outlook is not None
        seen = dataclasses.replace(self._outlook, plan=engine.plan)
        micros = seen.training.accumulate_grad_batches
        tokens = round(fmean(record.num_tokens for record in later or self.records) / micros)
        return RunCost(
            plan=engine.plan,
            records=self.records,
            paging_peak_bytes=stats.ram_peak_bytes,
            graph_peak_bytes=stats.graph_peak_bytes,
            units_run=stats.units_run,
            units_kept=stats.units_kept,
            process_peak_bytes=self._sampler.peak_bytes,
            read_bytes_per_step=read_per_step,
            written_bytes_per_step=(stats.bytes_written - num_written) / num_steps,
            expected_read_bytes=expected_read,
            expected_written_bytes=expected_written,
            planned_ram_bytes=seen.ram_bytes(tokens),
            planned=seen.step(tokens) if tokens else None,
            advice=advise(later or self.records, situation(trainer, engine)),
        )


def paging_engine(trainer: Trainer) -> Engine | None:
    """Return the engine of a trainer whose strategy pages, None for any other strategy."""
    strategy = trainer.strategy
    return strategy.engine if isinstance(strategy, MegaTrainStrategy) else None
