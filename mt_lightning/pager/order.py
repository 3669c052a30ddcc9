"""The order in which units are visited, learned from the step before."""

from __future__ import annotations


class LearnedOrder:
    """Remembers one step's visits and says which come next.

    A wrong guess costs a read that was not needed, never an error.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        self._current: list[int] = []
        self._position = 0

    def observe(self, unit: int) -> None:
        """Note that `unit` is visited now."""
        self._current.append(unit)
        known = self._known
        for ahead in range(self._position, len(known)):
            if known[ahead] == unit:
                self._position = ahead + 1
                return

    def predict(self, count: int) -> list[int]:
        """Return up to `count` different units that are expected next, nearest first."""
        known = self._known
        if not known or count <= 0:
            return []
        upcoming: dict[int, None] = {}
        for ahead in range(len(known)):
            upcoming.setdefault(known[(self._position + ahead) % len(known)])
            if len(upcoming) == count:
                break
        return list(upcoming)

    def end_of_step(self) -> None:
        """Take the visits since the last call as the known order."""
        if self._current:
            self._known, self._current = self._current, []
        self._position = 0
