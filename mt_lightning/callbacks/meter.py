"""What one optimizer step cost: differences of the engine's counters over its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mt_lightning.pager.stats import Stats


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
    written_bytes: int
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

    Only the time between the start and the end of a training batch counts, so validation and
    checkpoints between two steps belong to neither.
    """

    def __init__(
        self,
        read_stats: Callable[[], Stats],
        global_step: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start before the first batch.

        Args:
            read_stats: gives the counters of the engine, up to date.
            global_step: optimizer steps done so far.
            clock: seconds that only grow.
        """
        self._read_stats = read_stats
        self._clock = clock
        self._global_step = global_step
        self._batch_start: tuple[float, Mapping[str, float]] | None = None
        self._open: dict[str, float] = {}

    def start_batch(self) -> None:
        """Note clock and counters at the start of a training batch."""
        self._batch_start = (self._clock(), self._read_stats().snapshot())

    def end_batch(self, batch: Any, global_step: int) -> StepRecord | None:
        """Add a batch to the open step; return its record if the optimizer has stepped."""
        assert self._batch_start is not None
        start_s, before = self._batch_start
        after = self._read_stats().snapshot()
        cost = {
            "wall_s": self._clock() - start_s,
            "num_tokens": count_tokens(batch),
            "read_bytes": after["bytes_read"] - before["bytes_read"],
            "written_bytes": after["bytes_written"] - before["bytes_written"],
            **{
                field: after[field] - before[field]
                for field in ("stall_read_s", "stall_update_s", "stall_memory_s", "update_s")
            },
        }
        for field, value in cost.items():
            self._open[field] = self._open.get(field, 0) + value
        if global_step == self._global_step:
            return None
        self._global_step = global_step
        total, self._open = self._open, {}
        return StepRecord(
            step=global_step,
            ram_used_bytes=int(after["ram_used_bytes"]),
            num_tokens=int(total.pop("num_tokens")),
            read_bytes=int(total.pop("read_bytes")),
            written_bytes=int(total.pop("written_bytes")),
            **total,
        )


def count_tokens(batch: Any) -> int:
    """Return the number of `input_ids` in a batch, 0 if it has none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, torch.Tensor) else 0
