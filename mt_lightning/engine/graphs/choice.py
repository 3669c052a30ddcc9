"""Which graphs to keep, from what those of the pass before took."""

from __future__ import annotations

from collections.abc import Iterable


class Choice:
    """Chooses the units whose graphs are kept, before they run.

    [Note: the last units first]
    Backward begins with them: their graphs are held for the shortest time, and free first. What is
    expected grows with the size of the batch. A wrong guess costs time alone: a graph that finds no
    room is dropped, and one that was not kept is computed again.

    Args:
        limit_bytes: Room for all graphs.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._share: dict[int, float] = {}
        """Bytes of each unit's graphs for one element of what the pass received."""
        self._order: dict[int, None] = {}
        self._now: dict[int, None] = {}
        self._bytes: dict[int, int] = {}
        self._size = 0
        self._chosen: set[int] = set()

    def wants(self, unit: int, size: int) -> bool:
        """Return whether to keep the graph of a unit that begins to run.

        Args:
            unit: Its index.
            size: Elements that it receives; those of a pass's first unit tell the pass's size.
        """
        if not self._size:
            self._size = max(1, size)
            self._chosen = self._choose()
        self._now.pop(unit, None)
        self._now[unit] = None
        return unit in self._chosen or unit not in self._share

    def saw(self, unit: int, nbytes: int) -> None:
        """Take note of what a unit's graph takes; a unit may run several times in a pass."""
        self._bytes[unit] = self._bytes.get(unit, 0) + nbytes

    def end_pass(self) -> None:
        """Take what ran since the last call as what will run next."""
        if not self._size:
            return
        for unit, nbytes in self._bytes.items():
            self._share[unit] = nbytes / self._size
        self._order, self._now, self._bytes, self._size = self._now, {}, {}, 0

    def _choose(self) -> set[int]:
        chosen, room = set(), float(self._limit_bytes)
        for unit in _backward(self._order):
            nbytes = self._share.get(unit, 0.0) * self._size
            if nbytes <= room:
                chosen.add(unit)
                room -= nbytes
        return chosen


def _backward(order: Iterable[int]) -> Iterable[int]:
    return reversed(list(order))
