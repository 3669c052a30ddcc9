"""Freed memory that the C library keeps for what comes next: counted, bounded, given back in time.

[Note: one bound]
Tensors that the budget counts (gradients, graphs, inputs of units) lie in the heap. Once freed they
are still counted as kept until something else wants their room. Beside them the heap holds what
nobody counts: activations. How much of it is free cannot be told from inside. But the process may
take what the budget allows and, beside it, what a single stretch between two looks was seen to
take when nothing was free at its start, with a sixteenth of the budget for gaps between blocks; or
an eighth of the budget beside the least that it takes. Within that bound freed memory stays: what
one unit frees the next one takes, and the kernel need not zero it again. Above it, all of it is
given back.
"""

from __future__ import annotations

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
        self._floor_bytes: int | None = None
        """Beside budget and frames, the least since the heap was last given back."""
        self._needed_bytes = 0
        """The same at the end of a stretch that began with nothing free, at most."""
        self._is_fresh = False
        """Whether the heap was given back when it was last looked at."""

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
        """Give the heap back where the process has taken more than it may.

        Args:
            frames_bytes: Memory that the process holds in frames.
        """
        beside = self._beside(frames_bytes)
        if self._is_fresh:
            self._needed_bytes = max(self._needed_bytes, beside)
        if self._floor_bytes is None:
            self._floor_bytes = beside
        self._is_fresh = self.excess_bytes() > 0
        if self._is_fresh:
            self.give_back()
            self._floor_bytes = self._beside(frames_bytes)
        else:
            self._floor_bytes = min(self._floor_bytes, beside)

    def excess_bytes(self, coming: int = 0) -> int:
        """Return by how much the process exceeds what it may take.

        Args:
            coming: Bytes that it is about to take.
        """
        if self._floor_bytes is None:
            return coming
        gaps = int(KEPT_SHARE * self._budget.limit_bytes)
        beside = max(self._floor_bytes + gaps, self._needed_bytes + gaps // 2)
        return self._anonymous() + coming - self._budget.limit_bytes - beside

    def _beside(self, frames_bytes: int) -> int:
        """Return what lives outside of frames, or is free there, and is not counted."""
        return self._anonymous() - frames_bytes - self._live_bytes - self.kept_bytes()
