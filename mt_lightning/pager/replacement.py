"""Which frame is given up: the one whose page is expected to be needed last.

[Note: what is expected] With the next uses known, giving up the frame that is needed last reads the
fewest bytes (Belady 1966). Here they are predicted. A page of which nothing is known counts as
needed later than any other; among those, the least recently used one goes first.

[Note: reading ahead does no harm] A page is read ahead only into the frame that would be given up
for it anyway: never into one needed before it, and not while the frame that should go is still in
use. Where the predictions hold, reading ahead then costs no further reads, however far it looks.
One unit is exempt from the second rule: in a pass that begins anew at its end, as evaluation does,
the frame that should go is always the one in use, and nothing would be read ahead.
Source: the rules of Cao, Felten, Karlin and Li 1995.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

_DIRTY = 0.5
"""A dirty frame costs a write as well as a read: it must be needed twice as late to go."""


class Record(Protocol):
    """What is known of a page in RAM."""

    dirty: bool

    @property
    def index(self) -> int:
        """Number of the page."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that are free once it is given up."""
        ...

    @property
    def idle(self) -> bool:
        """Whether nobody needs it now."""
        ...


R = TypeVar("R", bound=Record)
NextUse = Callable[[int], float | None]
"""Accesses until a page is needed, infinity if unknown; None for one that always is."""


def nothing_known(page: int) -> float:
    """Give every page up in the order of its last use."""
    return math.inf


def choose(records: Iterable[R], next_use: NextUse) -> R | None:
    """Return the idle record to give up, the earlier of two alike; None where none is idle."""
    best, farthest = None, -math.inf
    for record in records:
        if not record.idle:
            continue
        distance = _distance(record, next_use)
        if distance > farthest:
            best, farthest = record, distance
    return best


def choose_ahead(
    records: Iterable[R], next_use: NextUse, page: int, nbytes: int, *, patient: bool = True
) -> list[R] | None:
    """Return the records to give up for reading `page` ahead of its use.

    Args:
        records: All pages in RAM, least recently used first.
        next_use: When each is needed.
        page: The page that is to be read.
        nbytes: Bytes that must become free.
        patient: Whether to wait while the record that should go is in use.

    Returns:
        Clean idle records of at least that many bytes that are needed later than `page`; None where
        there are not enough, or where one still in use is needed later than they are.
    """
    own = next_use(page)
    own = 0.0 if own is None else own
    ranked = []
    latest_in_use = -math.inf
    for record in records:
        distance = next_use(record.index)
        if distance is None:
            continue
        if not record.idle:
            if not math.isinf(distance):
                latest_in_use = max(latest_in_use, distance)
        elif not record.dirty and (distance > own or math.isinf(distance)):
            ranked.append((distance, record))
    ranked.sort(key=lambda item: -item[0])
    chosen: list[R] = []
    for distance, record in ranked:
        if nbytes <= 0:
            break
        if patient and distance < latest_in_use:
            return None
        chosen.append(record)
        nbytes -= record.nbytes
    return chosen if nbytes <= 0 else None


def _distance(record: Record, next_use: NextUse) -> float:
    distance = next_use(record.index)
    if distance is None:
        return 0.0
    return distance * _DIRTY if record.dirty else distance
