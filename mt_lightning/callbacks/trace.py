"""PagingTrace: a timeline of some steps, for Perfetto."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mt_lightning.callbacks.chrome_trace import Gauge, TraceRecorder
from mt_lightning.callbacks.recorder import paging_engine
from mt_lightning.engine.engine import Engine
from mt_lightning.errors import ConfigError
from mt_lightning.tiers.spans import listen, unlisten

log = logging.getLogger(__name__)

_MIB = 1 << 20


class PagingTrace(Callback):
    """Write what every thread did during some optimizer steps, as a Chrome trace.

    Open the file in https://ui.perfetto.dev or chrome://tracing. It shows the spans of the training
    thread, the update worker and the I/O threads, memory of paging by purpose, and how much waits
    in the queues. Outside of these steps nothing is recorded. Under another strategy than
    megatrain it says so once and does nothing.

    Args:
        path: The file; one that exists is replaced. It is compressed where it ends with `.gz`.
        steps: First and last optimizer step that is recorded, counted from 1. The first two fill
            memory and are not like the others.

    Raises:
        ConfigError: `steps` is not a pair of numbers from 1 on, in order.
    """

    def __init__(
        self, path: str | os.PathLike[str] = "trace.json", steps: Sequence[int] = (3, 5)
    ) -> None:
        self._path = Path(path)
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise ConfigError(
                f"PagingTrace(steps={steps!r}) must be the first and the last step, counted from "
                "1, such as (3, 5)."
            )
        self._first, self._last = steps
        self._engine: Engine | None = None
        self._recorder: TraceRecorder | None = None
        self._step_begin_ns = self._batch_end_ns = 0
        self._num_steps = 0
        self._has_told = self._written = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See whether the strategy pages."""
        self._engine, self._written = paging_engine(trainer), False
        if self._engine is None and not self._has_told:
            log.info("PagingTrace: the strategy is not megatrain; there is nothing to record.")
            self._has_told = True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to record with the first step, and end after the last one."""
        now_ns, num_steps = time.perf_counter_ns(), trainer.global_step
        if self._recorder is not None:
            self._recorder.add("steps", "between batches", "", self._batch_end_ns, now_ns)
            if num_steps >= self._last:
                self._write()
        elif self._engine is not None and self._first - 1 <= num_steps < self._last:
            self._recorder = TraceRecorder(_gauges(self._engine))
            self._step_begin_ns, self._num_steps = now_ns, num_steps
            listen(self._recorder)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the end of a step."""
        recorder, num_steps = self._recorder, trainer.global_step
        if recorder is None:
            return
        now_ns = self._batch_end_ns = time.perf_counter_ns()
        if num_steps > self._num_steps:
            recorder.add("steps", "step", str(num_steps), self._step_begin_ns, now_ns)
            self._step_begin_ns, self._num_steps = now_ns, num_steps

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what there is."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write what there is."""
        self._close()

    def _close(self) -> None:
        if self._recorder is not None:
            self._write()
        elif self._engine is not None and not self._written:
            log.warning(
                "PagingTrace: training ended before step %d, so that %s was not written. Give "
                "steps=(first, last) that the run reaches.",
                self._first,
                self._path,
            )
        self._engine = None

    def _write(self) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        unlisten(recorder)
        recorder.write(self._path)
        self._written = True
        if recorder.full:
            log.warning("PagingTrace: the trace ends early; record fewer steps.")
        log.info("Trace of steps %d to %d: %s", self._first, self._last, self._path)


def _gauges(engine: Engine) -> dict[str, Gauge]:
    run, io = engine.live.run, engine.machine.io

    def memory() -> dict[str, float]:
        return {purpose: n / _MIB for purpose, n in run.budget.by_purpose.items()}

    def queues() -> dict[str, float]:
        return {"I/O operations": io.num_queued, "updates": run.worker.num_pending}

    def ahead() -> dict[str, float]:
        unused, window = run.pool.unused_bytes, run.ahead.window_bytes
        return {"not used yet": unused / _MIB, "window": window / _MIB}

    return {"memory of paging (MiB)": memory, "waiting": queues, "read ahead (MiB)": ahead}
