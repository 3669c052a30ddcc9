"""Which of several directories the next file lies in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Place = TypeVar("Place", bound=Hashable)


def least_full(nbytes: int, assigned: Mapping[Place, int], free: Mapping[Place, int]) -> Place:
    """Return the place that is least full of our bytes once these are added.

    Args:
        nbytes: Of the file, its header included.
        assigned: What lies in each place already.
        free: What each has left.
    """

    def fullness(place: Place) -> tuple[bool, float]:
        has, left = assigned[place], free[place]
        return nbytes > left, (has + nbytes) / (has + left + 1)

    return min(assigned, key=fullness)
