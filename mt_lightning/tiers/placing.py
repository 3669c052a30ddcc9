"""Which of several directories the next file lies in.

[Note: files that are in use at once]
While a page is updated, the weights of the page before it are written, and those of the next ones
are read. A drive that serves two of these takes turns, and the others wait. So the files of a page
lie on drives that differ from each other, and from those of the page before: weights in their first
slot are dealt out to one drive after the other, and the other files of a page lie beside them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Place = TypeVar("Place", bound=Hashable)

_FROM_FIRST = {"state.0": 1, "state.1": 2, "weight.1": 3}
"""How many drives further than the first slot of its page's weights a file should lie."""


def place_for(
    name: str,
    nbytes: int,
    places: Mapping[str, Place],
    assigned: Mapping[Place, int],
    free: Mapping[Place, int],
) -> Place:
    """Return the place that suits a file best, of those that are least full of our bytes.

    Args:
        name: Of the file: page, plane and slot.
        nbytes: Its length, with its header.
        places: Where the files before it lie, in the order in which they were made.
        assigned: What lies in each place already.
        free: What each has left.
    """

    def fullness(place: Place, nbytes: int) -> tuple[bool, float]:
        has, left = assigned[place], free[place]
        return nbytes > left, (has + nbytes) / (has + left + 1)

    least = min(assigned, key=lambda place: fullness(place, nbytes))
    suited = _suited(name, places, list(assigned))
    if suited is None or nbytes > free[suited]:
        return least
    # It may be fuller by one file of this length: drives fill evenly all the same.
    return suited if fullness(suited, 0) <= fullness(least, nbytes) else least


def _suited(name: str, places: Mapping[str, Place], order: list[Place]) -> Place | None:
    page, _, kind = name.partition(".")
    first, further = places.get(f"{page}.weight.0"), _FROM_FIRST.get(kind)
    if first is None or further is None:
        return None
    return order[(order.index(first) + further) % len(order)]
