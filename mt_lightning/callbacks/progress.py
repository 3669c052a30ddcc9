"""A progress bar that shows loss, tokens per second, memory of paging and stall."""

from __future__ import annotations

import math
from typing import Any

import rich
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_NAMES_AND_FORMATS = {
    "train_loss": ("loss", "{:.3f}"),
    "mt/tokens_per_s": ("tok/s", "{:.0f}"),
    "mt/ram_gib": ("RAM", "{:.2f} GiB"),
    "mt/stall_share": ("stall", "{:.0%}"),
}

_SPEED_PERIOD_S = 300  # steps of several seconds must still give a time left


class PagingProgressBar(ProgressBar):
    """One line per phase: optimizer steps, time left, and the metrics of `PagingMonitor`.

    Where the output is not a terminal, it writes a line every `plain_every_n_steps` optimizer
    steps instead of a bar that cannot be redrawn.

    Args:
        plain_every_n_steps: optimizer steps between two lines where there is no terminal.
        console: where the bar goes; None means rich's global console.
    """

    def __init__(self, *, plain_every_n_steps: int = 10, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or rich.get_console()
        self._plain_every_n_steps = plain_every_n_steps
        self._is_enabled = True
        self._progress: Progress | None = None
        self._train_task: TaskID | None = None
        self._eval_task: TaskID | None = None
        self._last_plain_step = -1

    def disable(self) -> None:
        """Draw nothing; Lightning calls this on all processes but the first."""
        self._is_enabled = False

    def enable(self) -> None:
        """Draw again."""
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        self._console.print(*args, **kwargs)

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the metrics of the bar: loss, tok/s, RAM, stall, then the others."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        shown = {
            name: template.format(metrics.pop(key))
            for key, (name, template) in _NAMES_AND_FORMATS.items()
            if key in metrics
        }
        return {**shown, **metrics}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the bar of the optimizer steps."""
        self._train_task = self._add_task("step", _num_steps(trainer), trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Move the bar, or write a line."""
        metrics = self.get_metrics(trainer, pl_module)
        text = "  ".join(f"{name} {_format(value)}" for name, value in metrics.items())
        step = trainer.global_step
        if self._progress is not None and self._train_task is not None:
            self._progress.update(self._train_task, completed=step, metrics=text)
            return
        due = step == 1 or step % self._plain_every_n_steps == 0
        if self._is_enabled and due and step not in (0, self._last_plain_step):
            self._last_plain_step = step
            total = _num_steps(trainer)
            self._console.print(
                f"step {step}{f'/{total}' if total is not None else ''}  {text}",
                highlight=False,
                soft_wrap=True,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the finished bar on the screen."""
        self._stop()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start the bar of a validation set."""
        if self.has_dataloader_changed(dataloader_idx):
            self._remove_eval_task()
            name = "sanity check" if trainer.sanity_checking else "validation"
            total = self.total_val_batches_current_dataloader
            self._eval_task = self._add_task(name, _finite(total))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Move the bar of the validation set."""
        self._advance_eval_task(batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the bar of the validation set away."""
        self._end_evaluation(trainer)

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start the bar of a test set."""
        if self.has_dataloader_changed(dataloader_idx):
            self._remove_eval_task()
            total = self.total_test_batches_current_dataloader
            self._eval_task = self._add_task("test", _finite(total))

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Move the bar of the test set."""
        self._advance_eval_task(batch_idx + 1)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the bar of the test set away."""
        self._end_evaluation(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the bar where it stands."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._stop()

    def _add_task(self, name: str, total: float | None, completed: int = 0) -> TaskID | None:
        if not (self._is_enabled and self._console.is_terminal):
            return None
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                MofNCompleteColumn(),
                BarColumn(bar_width=10),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                TextColumn("{task.fields[metrics]}"),
                console=self._console,
                speed_estimate_period=_SPEED_PERIOD_S,
            )
            self._progress.start()
        return self._progress.add_task(name, total=total, completed=completed, metrics="")

    def _advance_eval_task(self, completed: int) -> None:
        if self._progress is not None and self._eval_task is not None:
            self._progress.update(self._eval_task, completed=completed)

    def _remove_eval_task(self) -> None:
        if self._progress is not None and self._eval_task is not None:
            self._progress.remove_task(self._eval_task)
        self._eval_task = None

    def _end_evaluation(self, trainer: Trainer) -> None:
        self._remove_eval_task()
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn != "fit":
            self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._train_task = self._eval_task = None


def _num_steps(trainer: Trainer) -> int | None:
    return _finite(trainer.estimated_stepping_batches)


def _finite(total: float) -> int | None:
    return int(total) if math.isfinite(total) else None


def _format(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
