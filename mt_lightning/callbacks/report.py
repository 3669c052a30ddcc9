"""PagingReport: one page that shows where the memory, the time and the bytes of a fit went."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from mt_lightning.callbacks.chrome_trace import TraceRecorder
from mt_lightning.callbacks.memory import process_memory_bytes
from mt_lightning.callbacks.meter import StepRecord
from mt_lightning.callbacks.recorder import PagingRecorder, RunCost
from mt_lightning.callbacks.report_page import page_html
from mt_lightning.callbacks.report_plots import Course, draw
from mt_lightning.engine.plan import Plan
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.tiers.filesystem import files_bytes
from mt_lightning.tiers.spans import listen, listening, unlisten

log = logging.getLogger(__name__)

_TIMELINE_STEP = 3
"""The first two fill memory and are not like the others."""
_DISK_INTERVAL_S = 2.0


class PagingReport(PagingRecorder):
    """Write `report.html` and its plots as PNG files when fit ends, by success or by an error.

    The page needs nothing beside it: what fit cost against what was planned, the loss, memory of
    each tier, time, bytes and speed of the drive over the steps, a timeline of one step, and what
    the run wears the drive by. Under another strategy it says so once and does nothing.

    Args:
        directory: where the report goes; None means `paging_report` in the trainer's
            `default_root_dir`.

    Raises:
        ConfigError: if matplotlib is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "PagingReport draws with matplotlib, which is not installed. "
                "Run: pip install 'mt-lightning[examples]'."
            )
        self._directory = directory
        self._course = Course()
        self._losses: list[float] = []
        self._timeline: TraceRecorder | None = None
        self._timeline_step = _TIMELINE_STEP
        self._disk_s = 0.0

    def on_begin(self, trainer: Trainer, plan: Plan) -> None:
        """Forget an earlier fit, and make the folder while there is nothing to lose.

        Raises:
            StorageError: The folder cannot be made or written to.
        """
        folder = self._folder(trainer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, "it cannot be written to")
        except OSError as error:
            raise StorageError(
                error.errno,
                f"PagingReport cannot make its folder ({error.strerror}); set "
                "PagingReport(directory=...) to one that can be written to",
                str(folder),
            ) from error
        self._course, self._losses, self._timeline = Course(), [], None
        self._disk_s = 0.0
        steps = trainer.estimated_stepping_batches
        first = trainer.global_step
        self._timeline_step = first + int(min(_TIMELINE_STEP, max(1, steps - first)))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Listen to the step whose timeline is drawn, unless somebody else listens."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        coming = trainer.global_step + 1 == self._timeline_step
        if self._engine is not None and coming and self._timeline is None and not listening():
            self._timeline = TraceRecorder({})
            listen(self._timeline)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the loss of a batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(float(loss.detach()))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step(self, trainer: Trainer, pl_module: LightningModule, record: StepRecord) -> None:
        """Note the loss, and the memory of each tier."""
        if self._timeline is not None and record.step == self._timeline_step:
            unlisten(self._timeline)
        losses, self._losses = self._losses, []
        self._course.losses.append(sum(losses) / len(losses) if losses else float("nan"))
        self._course.process_bytes.append(process_memory_bytes())
        now_s = time.monotonic()
        if now_s - self._disk_s >= _DISK_INTERVAL_S or not self._course.disk_bytes:
            assert self._engine is not None
            self._disk_s = now_s
            self._course.disk_bytes.append(files_bytes(self._engine.machine.directories))
        else:
            self._course.disk_bytes.append(self._course.disk_bytes[-1])

    def on_close(self, trainer: Trainer, cost: RunCost) -> None:
        """Write the report."""
        events = self._timeline.events if self._timeline is not None else []
        plots = draw(cost, self._course, events, self._timeline_step)
        title = type(trainer.lightning_module).__name__
        folder = self._folder(trainer)
        try:
            for name, png in plots.items():
                (folder / f"{name}.png").write_bytes(png)
            (folder / "report.html").write_text(page_html(title, cost, plots), encoding="utf-8")
        except OSError as error:
            # Training is over, or ends by an error of its own: neither is to be lost for a page.
            log.warning(
                "PagingReport: the report is not written whole: %s. Free space, or set "
                "PagingReport(directory=...) to a folder that can be written to.",
                error,
            )
            return
        log.info("Paging report: %s", folder / "report.html")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report of what has been done, and listen no more."""
        self._stop_listening()
        super().on_fit_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the report of what has been done, and listen no more."""
        self._stop_listening()
        super().on_exception(trainer, pl_module, exception)

    def _stop_listening(self) -> None:
        if self._timeline is not None:
            unlisten(self._timeline)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self._directory or Path(trainer.default_root_dir) / "paging_report")
