"""PagingMonitor: live metrics of paging, and a table before and after the run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import rich
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from mt_lightning.callbacks.memory import MemorySampler
from mt_lightning.callbacks.meter import StepMeter, StepRecord
from mt_lightning.callbacks.tables import GIB, closing_table, plan_table
from mt_lightning.strategy import MegaTrainStrategy

if TYPE_CHECKING:
    from mt_lightning.engine.engine import Engine

log = logging.getLogger(__name__)

_GB = 10**9


class PagingMonitor(Callback):
    """Log what paging does at every optimizer step, and show a table at start and end of fit.

    Logged: `mt/ram_gib` (memory of paging, GiB), `mt/stall_share` (waiting as a share of the
    step), `mt/read_gb` and `mt/written_gb` (bytes of this step, 10^9), and `mt/tokens_per_s` if
    the batch has `input_ids`. Under another strategy it says so once and does nothing.
    """

    def __init__(self, *, tables: bool = True, console: Console | None = None) -> None:
        """Watch nothing yet.

        Args:
            tables: show the two tables.
            console: where they go; None means rich's global console.
        """
        self.records: list[StepRecord] = []
        self.process_peak_bytes = 0
        self._tables = tables
        self._console = console
        self._engine: Engine | None = None
        self._meter: StepMeter | None = None
        self._sampler = MemorySampler()
        self._has_warned = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show what goes where and begin to sample memory."""
        engine = self._engine = paging_engine(trainer)
        if engine is None:
            if not self._has_warned:
                log.info("PagingMonitor: the strategy is not megatrain; nothing to watch.")
                self._has_warned = True
            return
        self.records = []
        self._meter = StepMeter(lambda: engine.stats, trainer.global_step)
        self._sampler.start()
        if self._tables:
            assert engine.plan is not None
            self._print(plan_table(engine.plan))

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
        """Log the metrics of a finished optimizer step."""
        if self._meter is None:
            return
        record = self._meter.end_batch(batch, trainer.global_step)
        if record is None:
            return
        self.records.append(record)
        shown = {
            "mt/ram_gib": record.ram_used_bytes / GIB,
            "mt/stall_share": record.stall_share,
        }
        if record.num_tokens:
            shown["mt/tokens_per_s"] = record.tokens_per_s
        pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True)
        traffic = {
            "mt/read_gb": record.read_bytes / _GB,
            "mt/written_gb": record.written_bytes / _GB,
        }
        pl_module.log_dict(traffic, on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show what the run cost; all updates have been written by now."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Show what the run has cost so far."""
        self._close()

    def _close(self) -> None:
        engine, self._engine, self._meter = self._engine, None, None
        if engine is None:
            return
        self._sampler.stop()
        self.process_peak_bytes = self._sampler.peak_bytes
        if self._tables and self.records:
            assert engine.plan is not None
            self._print(
                closing_table(
                    engine.plan,
                    engine.stats,
                    self.records,
                    process_peak_bytes=self.process_peak_bytes,
                    expected_bytes_per_step=engine.expected_bytes_per_step(),
                )
            )

    def _print(self, renderable: Any) -> None:
        (self._console or rich.get_console()).print(renderable)


def paging_engine(trainer: Trainer) -> Engine | None:
    """Return the engine of a trainer whose strategy pages, None for any other strategy."""
    strategy = trainer.strategy
    return strategy.engine if isinstance(strategy, MegaTrainStrategy) else None
