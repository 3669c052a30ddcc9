"""What one optimizer step cost: differences of the engine's counters over its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mt_lightning.pager.stats import Stats

_INPUTS = ("inputs_bytes", "inputs_spilled_bytes", "inputs_read_bytes")
_STALLS = ("stall_read_s", "stall_update_s", "stall_memory_s")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The cost of one optimizer step, over all its micro-batches."""

    step: int
    """Number of optimizer steps done, this one included."""
    wall_s: float
    """Time from batch start to batch end, summed over the micro-batches."""
    num_tokens: int
    """Tokens trained on; 0 where the batch has no `input_ids`."""
    read_bytes: int
    """Read since the end of the step before."""
    written_bytes: int
    """Written since the end of the step before."""
    inputs_bytes: int
    """Inputs of units that backward needed."""
    inputs_spilled_bytes: int
    """Of them written to disk, beside `written_bytes`."""
    inputs_read_bytes: int
    """Of them read back, beside `read_bytes`."""
    spans_evaluation: bool
    """Whether a validation ran since the end of the step before."""
    stall_read_s: float
    """Training waited for weights."""
    stall_update_s: float
    """Training waited for an update."""
    stall_memory_s: float
    """Training waited for memory."""
    update_s: float
    """The update worker was busy; most of it overlaps with compute."""
    ram_used_bytes: int
    """Memory of paging at the end of the step."""

    @property
    def stall_s(self) -> float:
        """All the time that training waited."""
        return self.stall_read_s + self.stall_update_s + self.stall_memory_s

    @property
    def stall_share(self) -> float:
        """Waiting as a share of the step, from 0 to 1."""
        return min(1.0, self.stall_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on per second."""
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0


class StepMeter:
    """Turns the cumulative counters of an engine into one record per optimizer step.

    Times count between start and end of a training batch. Bytes count from the end of a step to
    the end of the next: a worker writes between batches, too.

    Args:
        read_stats: gives the counters of the engine, up to date.
        global_step: optimizer steps done so far.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        read_stats: Callable[[], Stats],
        global_step: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read_stats = read_stats
        self._clock = clock
        self._global_step = global_step
        self._step_end = self._batch_start = read_stats().snapshot()
        self._batch_start_s = clock()
        self._open = dict.fromkeys((*_STALLS, "update_s", "wall_s", "num_tokens"), 0.0)
        self._spans_evaluation = False

    def start_batch(self) -> None:
        """Note clock and counters at the start of a training batch."""
        self._batch_start_s = self._clock()
        self._batch_start = self._read_stats().snapshot()

    def note_evaluation(self) -> None:
        """Note that a validation reads pages before the open step ends."""
        self._spans_evaluation = True

    def end_batch(self, batch: Any, global_step: int) -> StepRecord | None:
        """Add a batch to the open step; return its record if the optimizer has stepped."""
        now = self._read_stats().snapshot()
        self._open["wall_s"] += self._clock() - self._batch_start_s
        self._open["num_tokens"] += count_tokens(batch)
        for field in (*_STALLS, "update_s"):
            self._open[field] += now[field] - self._batch_start[field]
        if global_step == self._global_step:
            return None
        record = StepRecord(
            step=global_step,
            wall_s=self._open["wall_s"],
            num_tokens=int(self._open["num_tokens"]),
            read_bytes=int(now["bytes_read"] - self._step_end["bytes_read"]),
            written_bytes=int(now["bytes_written"] - self._step_end["bytes_written"]),
            **{field: int(now[field] - self._step_end[field]) for field in _INPUTS},
            spans_evaluation=self._spans_evaluation,
            stall_read_s=self._open["stall_read_s"],
            stall_update_s=self._open["stall_update_s"],
            stall_memory_s=self._open["stall_memory_s"],
            update_s=self._open["update_s"],
            ram_used_bytes=int(now["ram_used_bytes"]),
        )
        self._global_step, self._step_end = global_step, now
        self._open = dict.fromkeys(self._open, 0.0)
        self._spans_evaluation = False
        return record


def count_tokens(batch: Any) -> int:
    """Return the number of `input_ids` in a batch, 0 if it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, torch.Tensor) else 0
