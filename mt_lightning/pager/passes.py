"""How often, and where in a forward pass, each unit is used."""

from __future__ import annotations

import math

_RATE = 0.1
"""Weight of the latest pass."""
_LEAST = 1e-3
_SLACK = 3.0
"""Accesses by which places vary from pass to pass."""


class Passes:
    """Learns the places of units in forward passes, and the share of passes that use them.

    Attributes:
        length: Accesses of a pass, its backward included.
        turn: Accesses from its start to its backward.
    """

    def __init__(self) -> None:
        self.length = self.turn = 0.0
        self._number = self._start = 0
        self._place: dict[int, float] = {}
        self._share: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._here = 0.0

    def begin(self, now: int) -> None:
        """Begin a pass with access number `now`."""
        if self._number:
            self.length = _average(self.length, now - self._start)
        self._number += 1
        self._start = now

    def turn_round(self, now: int) -> None:
        """Begin the backward of the pass."""
        self.turn = _average(self.turn, now - self._start)

    def visit(self, unit: int, now: int) -> None:
        """Take note that forward uses `unit`."""
        if self._seen.get(unit) != self._number:
            place = now - self._start
            if unit in self._place:
                self._share[unit] = self._share_now(unit, self._number - 1) * (1 - _RATE) + _RATE
                self._place[unit] += _RATE * (place - self._place[unit])
            else:
                self._share[unit] = 1 / self._number
                self._place[unit] = place
            self._seen[unit] = self._number
        self._here = self._place[unit]

    def left_of_forward(self, now: int) -> float:
        """Return how many accesses of the forward are expected to be left."""
        return max(self.turn - (now - self._start), 0.0)

    def next_use(self, unit: int, left_of_backward: int | None) -> float:
        """Return the distance of a unit's next chance, the farther the rarer the unit is used.

        The distance is divided by the share of passes that use the unit: what a frame gives is its
        hits over the accesses for which it is held.

        Args:
            unit: The unit.
            left_of_backward: How many accesses backward still has, None in forward.
        """
        place = self._place.get(unit)
        if place is None:
            return math.inf
        if left_of_backward is not None:
            distance = left_of_backward + place
            missed = self._number
        elif self._seen[unit] != self._number and place >= self._here - _SLACK:
            distance = max(place - self._here, 1.0)
            missed = self._number - 1
        else:
            distance = self.length - self._here + place
            missed = self._number
        return distance / max(self._share_now(unit, missed), _LEAST)

    def _share_now(self, unit: int, last: int) -> float:
        """Return the share after the pass numbered `last`."""
        return self._share[unit] * (1 - _RATE) ** max(last - self._seen[unit], 0)


def _average(known: float, found: float) -> float:
    return known + _RATE * (found - known) if known else found
