"""How much memory the whole process takes at its peak, where the host computes.

[Note: what is beside the budget] The program itself: what was there when training began is
measured. What libraries take at their first work and keep, buffers for matrix products among it:
measured too. What units compute, which is counted. And memory that was freed and that the C library
keeps for what comes next: `KeptHeap` bounds it, by a share of the budget or by as much again as
lives beside it. How much of that is kept when depends on what threads do at the same time, so the
peak lies between two figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_lightning.pager.kept_heap import KEPT_SHARE
from mt_lightning.planning.tiers import Tiers


@dataclass(frozen=True)
class ProcessPeak:
    """Anonymous memory of the process at its peak, in bytes.

    Attributes:
        least: With no freed memory kept at that moment.
        most: With all that may be kept; the usual peak of a run of many units under a budget.
    """

    least: int
    most: int


def process_peak(tiers: Tiers, base_bytes: int, library_bytes: int) -> ProcessPeak:
    """Return the peak of a run.

    Args:
        tiers: What the run needs.
        base_bytes: The process when training begins, frames of pages not counted.
        library_bytes: What libraries take at their first work and keep.
    """
    beside = tiers.ram_beside_bytes + library_bytes
    least = base_bytes + tiers.ram_peak_bytes + beside
    kept = max(int(KEPT_SHARE * tiers.ram_limit_bytes), beside)
    return ProcessPeak(least, least + kept)
