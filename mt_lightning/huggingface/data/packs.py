"""Which samples share a row of a batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Put the longest samples first, and each into the row where it fits most closely.

    Args:
        lengths: Tokens of each sample, none above `capacity`.
        capacity: Tokens of a row.

    Returns:
        The numbers of the samples of each row, rows and samples in ascending order. The same
        lengths give the same rows.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for index in order.tolist():
        length = int(lengths[index])
        assert 0 < length <= capacity
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room]
                rooms.pop(place)
        rows[row].append(index)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(row)
    return sorted(sorted(row) for row in rows)
