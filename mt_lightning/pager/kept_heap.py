"""Freed memory that the C library keeps for what comes next: counted, bounded, given back in time.

[Note: two bounds]
Tensors that the budget counts (gradients, graphs, inputs of units) lie in the heap. Once freed they
are still counted as kept, and are given back before anything else takes their room. Beside them
the heap holds what nobody counts: activations. How much of it is free cannot be told from inside;
but whenever a page is needed, the process is compared with the least that it has taken since the
heap was last given back. It may have grown by what is free in the budget, by an eighth of it, or by
as much again as lives beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from mt_lightning.pager.budget import Budget

FRAMED = ("weights", "state", "input frames")
"""What reservations of these purposes stand for lies in frames of the arena, not in the heap."""
KEPT_SHARE = 0.125
"""Of the budget: what may be kept free beside it."""


class KeptHeap:
    """The free part of the heap.

    Args:
        budget: Counts gradients, graphs and inputs of units.
        give_back: Gives all free pages of the heap back to the kernel.
        anonymous: Tells the anonymous memory of the process in bytes.
    """

    def __init__(
        self, budget: Budget, give_back: Callable[[], None], anonymous: Callable[[], int]
    ) -> None:
        self._budget = budget
        self._give_back = give_back
        self._anonymous = anonymous
        self._high_bytes = 0
        self._floor_bytes = self._least_bytes = sys.maxsize

    @property
    def framed_bytes(self) -> int:
        """Reserved bytes that lie in frames."""
        return sum(self._budget.by_purpose[purpose] for purpose in FRAMED)

    @property
    def _live_bytes(self) -> int:
        return self._budget.used_bytes - self.framed_bytes

    def kept_bytes(self, coming: int = 0) -> int:
        """Return the counted bytes that are kept free, once `coming` more were taken from them."""
        return max(0, self._high_bytes - self._live_bytes - coming)

    def took(self) -> None:
        """Take note that something was reserved."""
        self._high_bytes = max(self._high_bytes, self._live_bytes)

    def give_back(self) -> None:
        """Keep nothing."""
        self._give_back()
        self._high_bytes = self._live_bytes

    def check(self, frames_bytes: int) -> None:
        """Give the heap back where more of it is free than may be.

        Args:
            frames_bytes: Memory that the process holds in frames.
        """
        beside = self._beside(frames_bytes)
        free = max(
            KEPT_SHARE * self._budget.limit_bytes,
            self._budget.available_bytes,
            self._floor_bytes - self._least_bytes,
        )
        if beside <= self._floor_bytes + free:
            self._floor_bytes = min(self._floor_bytes, beside)
            return
        self.give_back()
        self._floor_bytes = self._beside(frames_bytes)
        self._least_bytes = min(self._least_bytes, self._floor_bytes)

    def _beside(self, frames_bytes: int) -> int:
        return self._anonymous() - frames_bytes - self._live_bytes
