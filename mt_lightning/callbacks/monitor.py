"""PagingMonitor: live metrics of paging, and a table before and after the run."""

from __future__ import annotations

from typing import Any

import rich
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from mt_lightning.callbacks.meter import PARTS, StepRecord
from mt_lightning.callbacks.recorder import PagingRecorder, RunCost
from mt_lightning.callbacks.tables import GIB, cost_table, plan_table
from mt_lightning.engine.plan import Plan

_GB = 10**9


class PagingMonitor(PagingRecorder):
    """Log what paging does at every optimizer step, and show a table at start and end of fit.

    Logged: `mt/ram_gib` (memory of paging, GiB), `mt/stall_share` (waiting as a share of the
    step), `mt/read_gb` and `mt/written_gb` (bytes of this step, 10^9), and `mt/tokens_per_s` if
    the batch has `input_ids`. Where the time of the step went, in seconds: `mt/step_s` is the sum
    of `mt/compute_s`, `mt/paging_s`, `mt/host_s` and of the waits `mt/stall_read_s`,
    `mt/stall_write_s`, `mt/stall_memory_s`, `mt/stall_device_s` and `mt/stall_update_s`.
    Under another strategy it says so once and does nothing.

    Args:
        tables: show the two tables.
        console: where they go; None means rich's global console.
    """

    def __init__(self, *, tables: bool = True, console: Console | None = None) -> None:
        super().__init__()
        self._tables = tables
        self._console = console

    def on_begin(self, trainer: Trainer, plan: Plan) -> None:
        """Show what goes where."""
        self._show(plan_table(plan))

    def on_step(self, trainer: Trainer, pl_module: LightningModule, record: StepRecord) -> None:
        """Log the metrics of a finished optimizer step."""
        shown = {
            "mt/ram_gib": record.ram_used_bytes / GIB,
            "mt/stall_share": record.stall_share,
        }
        if record.num_tokens:
            shown["mt/tokens_per_s"] = record.tokens_per_s
        traffic = {
            "mt/read_gb": record.read_bytes / _GB,
            "mt/written_gb": record.written_bytes / _GB,
        }
        pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True)
        times = {f"mt/{name}": getattr(record, name) for name in PARTS}
        rest = {**traffic, "mt/step_s": record.wall_s, **times}
        pl_module.log_dict(rest, on_step=True, on_epoch=False)

    def on_close(self, trainer: Trainer, cost: RunCost) -> None:
        """Show what the run cost."""
        self._show(cost_table(cost))

    def _show(self, table: Any) -> None:
        if self._tables:
            (self._console or rich.get_console()).print(table)
