"""What one optimizer step cost: differences of the engine's counters over its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mt_lightning.pager.stats import Stats

_INPUTS = ("inputs_bytes", "inputs_spilled_bytes", "inputs_read_bytes")
_TIMES = (
    "compute_s",
    "recompute_s",
    "paging_s",
    "stall_read_s",
    "stall_write_s",
    "stall_memory_s",
    "stall_device_s",
    "stall_update_s",
    "behind_read_s",
    "behind_write_s",
    "update_s",
    "update_read_s",
    "update_write_s",
    "drive_read_s",
    "drive_write_s",
)
PARTS = (
    "compute_s",
    "paging_s",
    "host_s",
    "stall_read_s",
    "stall_write_s",
    "stall_memory_s",
    "stall_device_s",
    "stall_update_s",
)
"""What the wall time of a `StepRecord` is the sum of."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The cost of one optimizer step, over all its micro-batches."""

    step: int
    """Number of optimizer steps done, this one included."""
    wall_s: float
    """Time since the end of the step before, without validation; the first one begins with its
    first batch."""
    between_s: float
    """Of it, between batches: the data loader, and hooks of epochs."""
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
    compute_s: float
    """Code of the model: forward, backward, loss."""
    recompute_s: float
    """Of it, units that ran again in backward."""
    paging_s: float
    """The training thread worked for paging, without waiting."""
    stall_read_s: float
    """Training waited for bytes of the drive."""
    stall_write_s: float
    """Training waited until the drive had taken bytes."""
    stall_memory_s: float
    """Training waited for memory."""
    stall_device_s: float
    """Training waited for bytes on their way to the device."""
    stall_update_s: float
    """Training waited for an update or a commit."""
    behind_read_s: float
    """Of the waits for updates and memory: the update worker waited for reads meanwhile."""
    behind_write_s: float
    """The same for writes."""
    update_s: float
    """The update worker was busy without waiting; most of it overlaps with compute."""
    update_read_s: float
    """The update worker waited for reads."""
    update_write_s: float
    """The update worker waited for writes."""
    drive_read_s: float
    """At least one read was under way."""
    drive_write_s: float
    """At least one write was under way."""
    ram_used_bytes: int
    """Memory of paging at the end of the step."""

    @property
    def stall_s(self) -> float:
        """All the time that training waited."""
        tiers_s = self.stall_read_s + self.stall_write_s + self.stall_device_s
        return tiers_s + self.stall_memory_s + self.stall_update_s

    @property
    def host_s(self) -> float:
        """All other code: the loop, the data loader, hooks and callbacks."""
        return self.wall_s - self.compute_s - self.paging_s - self.stall_s

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

    Everything counts from the end of a step to the end of the next. Validation in between does not:
    its time is left out, and its bytes are marked.

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
        self._step_end = read_stats().snapshot()
        self._mark: tuple[float, dict[str, float]] | None = None
        """Until when everything is in the open step, None while nothing counts."""
        self._open: dict[str, Any] = dict.fromkeys((*_TIMES, "wall_s", "between_s"), 0.0)
        self._num_tokens = 0
        self._begun = self._spans_evaluation = False

    def start_batch(self) -> None:
        """Note that a training batch begins."""
        if self._mark is not None:
            self._add("between_s")
        else:
            self._begun = True
            self._mark = self._clock(), self._read_stats().snapshot()

    def start_evaluation(self) -> None:
        """Leave out what follows: a validation before the open step ends."""
        self._spans_evaluation = True
        if self._mark is not None:
            self._add("between_s")
            self._mark = None

    def end_evaluation(self) -> None:
        """Count what follows."""
        if self._begun:
            self._mark = self._clock(), self._read_stats().snapshot()

    def _add(self, part: str | None = None) -> dict[str, float]:
        assert self._mark is not None
        (then_s, before), now_s, now = self._mark, self._clock(), self._read_stats().snapshot()
        self._mark = now_s, now
        for field in _TIMES:
            self._open[field] += now[field] - before[field]
        for field in ("wall_s", part):
            if field is not None:
                self._open[field] += now_s - then_s
        return now

    def end_batch(self, batch: Any, global_step: int) -> StepRecord | None:
        """Add a batch to the open step; return its record if the optimizer has stepped."""
        now = self._add()
        self._num_tokens += count_tokens(batch)
        if global_step == self._global_step:
            return None
        record = StepRecord(
            step=global_step,
            num_tokens=self._num_tokens,
            read_bytes=int(now["bytes_read"] - self._step_end["bytes_read"]),
            written_bytes=int(now["bytes_written"] - self._step_end["bytes_written"]),
            **{field: int(now[field] - self._step_end[field]) for field in _INPUTS},
            spans_evaluation=self._spans_evaluation,
            **self._open,
            ram_used_bytes=int(now["ram_used_bytes"]),
        )
        self._global_step, self._step_end = global_step, now
        self._open = dict.fromkeys(self._open, 0.0)
        self._num_tokens = 0
        self._spans_evaluation = False
        return record


def count_tokens(batch: Any) -> int:
    """Return the number of `input_ids` in a batch, 0 if it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, torch.Tensor) else 0
