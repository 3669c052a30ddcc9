"""What paging did and where its time went; only ever grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

Clock = Callable[[], float]


@dataclass
class Stats:
    """Cumulative counters of one engine.

    Attributes:
        steps: Optimizer steps applied.
        skipped_steps: Steps dropped because of a non-finite gradient.
        commits: Commit records written.
        pins: Times a page was needed.
        faults: Pins that found the page absent or still on its way.
        reloads: Weight planes read from disk.
        evictions: Weight planes dropped from RAM.
        prefetches: Reads begun ahead of need.
        prefetches_used: Those whose page was needed while it was still in RAM.
        prefetches_wasted: Those whose page was dropped before it was needed.
        spills: Gradient planes written to disk.
        bytes_read: Payload bytes read from page files.
        bytes_written: Payload bytes written to page files.
        inputs_bytes: Bytes that units received and backward needed.
        inputs_spilled_bytes: Bytes of them written to disk; not part of `bytes_written`.
        inputs_read_bytes: Bytes of them read back; not part of `bytes_read`.
        stall_read_s: Time training waited for weights.
        stall_update_s: Time training waited for an update that holds a page it needs.
        stall_memory_s: Time training waited for an update to give memory back.
        update_s: Time the update worker spent stepping optimizers.
        graphs_kept: Executions of units that backward did not have to run again.
        graph_peak_bytes: Most bytes that graphs of units ever held.
        units_run: Units that ran in the last forward pass, where their graphs may be kept.
        units_kept: Those of them that backward did not have to run again.
        ram_used_bytes: Bytes reserved now.
        ram_peak_bytes: Most bytes ever reserved.
    """

    steps: int = 0
    skipped_steps: int = 0
    commits: int = 0
    pins: int = 0
    faults: int = 0
    reloads: int = 0
    evictions: int = 0
    prefetches: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    spills: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    inputs_bytes: int = 0
    inputs_spilled_bytes: int = 0
    inputs_read_bytes: int = 0
    stall_read_s: float = 0.0
    stall_update_s: float = 0.0
    stall_memory_s: float = 0.0
    update_s: float = 0.0
    graphs_kept: int = 0
    graph_peak_bytes: int = 0
    units_run: int = 0
    units_kept: int = 0
    ram_used_bytes: int = 0
    ram_peak_bytes: int = 0

    def snapshot(self) -> dict[str, float]:
        """Return all counters as a dict."""
        return asdict(self)

    @contextmanager
    def timing(self, field: str, clock: Clock = time.perf_counter) -> Iterator[None]:
        """Add the time spent inside to `field`."""
        start = clock()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + clock() - start)
