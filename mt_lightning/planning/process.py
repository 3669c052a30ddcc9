"""How much memory the whole process takes at its peak, where the host computes.

[Note: what is beside the budget] The program itself, with what libraries take at their first work
and keep, buffers for matrix products among it: measured. What units compute, which is counted: what
one unit frees the next one takes again. And memory that was freed and lies between what lives:
`KeptHeap` gives it back when it grows beyond a share of the budget. How much of that is there at
the peak depends on what threads do at the same time, so the peak lies between two figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_lightning.pager.kept_heap import KEPT_SHARE
from mt_lightning.planning.tiers import Tiers


@dataclass(frozen=True)
class ProcessPeak:
    """Anonymous memory of the process at its peak, in bytes.

    Attributes:
        least: With no freed memory at that moment.
        most: With as much of it as is usually kept.
    """

    least: int
    most: int


def process_peak(tiers: Tiers, program_bytes: int) -> ProcessPeak:
    """Return the peak of a run.

    Args:
        tiers: What the run needs.
        program_bytes: The process without frames of pages and tensors, once all of it has worked.
    """
    least = program_bytes + tiers.ram_peak_bytes + tiers.ram_beside_bytes
    return ProcessPeak(least, least + int(KEPT_SHARE * tiers.ram_limit_bytes))
