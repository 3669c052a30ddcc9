"""What is read ahead, and how far.

[Note: how far] A page is read ahead when it is absent and expected, nearest first, while the bytes
that were read ahead and not used yet stay within a window. Each time the computation has to wait
for a read, the window grows; each time a page was read in vain, it shrinks. So a drive that keeps
up is asked for little, and one that does not is kept busy. A given number of units replaces the
window: then the expected units are looked at, that many and no more.

[Note: how sure] What is only likely is read ahead as long as most of it is used. Of rare experts
most is not, for those that are used often are in RAM: then only what is sure is read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mt_lightning.pager.predictor import LIKELY, SURE, Predictor

_GROWTH = 1.5
_SHRINKAGE = 0.8
_BOLDER, _SHYER = 1.1, 0.8
"""Of the doubt that is allowed, for each guess that was right or wrong; 7 in 10 right balance."""
_TRY_AGAIN = 1.002
"""The same, for each page of which there was no doubt."""
_MAX_UNITS = 64
"""Units that are looked at; those in RAM take none of the window."""


class ReadAhead:
    """Knows the order of use, page by page.

    Args:
        units: Pages of each unit, by its number.
        page_bytes: Bytes of each page, by its number.
        resident: Pages that always are in RAM.
        limit_bytes: The budget that the window stays within.
        num_units: How many units are looked ahead; None: as many as the window lets.

    Attributes:
        predictor: The order of units.
        window_bytes: Bytes that may be read ahead of their use.
        largest_bytes: Bytes of the largest unit.
    """

    def __init__(
        self,
        units: Sequence[Sequence[int]],
        page_bytes: Sequence[int],
        resident: Sequence[int],
        limit_bytes: int,
        num_units: int | None = None,
    ) -> None:
        self.predictor = Predictor()
        self._units = units
        self._page_bytes = page_bytes
        self._users: list[list[int]] = [[] for _ in page_bytes]
        for unit, pages in enumerate(units):
            for page in pages:
                self._users[page].append(unit)
        self._resident = frozenset(resident)
        self.on_access: Callable[[int, int], None] | None = None
        """Called with each access: the unit, and its kind."""
        self._num_units = num_units
        sizes = [sum(page_bytes[page] for page in pages) for pages in units]
        self.largest_bytes = max(sizes, default=0)
        self._least_bytes = 2 * self.largest_bytes
        self._most_bytes = max(limit_bytes // 2, self._least_bytes)
        self.window_bytes = self._least_bytes
        self._limit = LIKELY
        self._doubt = 0.0
        self._guessed: dict[int, float] = {}

    def observe(self, unit: int, kind: int) -> None:
        """Take note that `unit` is used now; `kind` is one of those of `Predictor.observe`."""
        if self.on_access is not None:
            self.on_access(unit, kind)
        self.predictor.observe(unit, kind)

    def next_use(self, page: int) -> float | None:
        """Return how many accesses lie before the next use of a page, None for a resident one."""
        if page in self._resident:
            return None
        return min((self.predictor.next_use(unit) for unit in self._users[page]), default=None)

    def upcoming(self) -> Iterator[int]:
        """Yield the pages expected next, nearest first."""
        most = _MAX_UNITS if self._num_units is None else self._num_units
        if most <= 0:
            return
        expected = self.predictor.expected(self._limit)
        for number, (unit, self._doubt) in enumerate(expected, start=1):
            yield from self._units[unit]
            if number == most:
                return

    def lets(self, page: int, unused_bytes: int) -> bool:
        """Return whether an absent page, the latest of `upcoming`, may be read now.

        Args:
            page: The page.
            unused_bytes: Bytes that were read ahead and have not been used.
        """
        self._guessed[page] = self._doubt
        return (
            self._num_units is not None
            or unused_bytes + self._page_bytes[page] <= self.window_bytes
        )

    def stalled(self) -> None:
        """Look farther: the computation has waited for a read."""
        self.window_bytes = min(int(self.window_bytes * _GROWTH), self._most_bytes)

    def judge(self, page: int, used: bool) -> None:
        """Learn whether a page that was read ahead was used, or given up before."""
        doubtful = self._guessed.pop(page, 0.0) > SURE
        if used:
            self._limit = min(self._limit * (_BOLDER if doubtful else _TRY_AGAIN), LIKELY)
            return
        self.window_bytes = max(int(self.window_bytes * _SHRINKAGE), self._least_bytes)
        if doubtful:
            self._limit = max(self._limit * _SHYER, SURE)
