"""What follows what: successors counted after the last few accesses, the longest context first.

[Note: back-off with confidence]
Each source proposes the access that comes next: the counts after the last 1, 2, 4 and 8 accesses,
and the match, which follows the last place in history where things went as they go now. How often a
source in the same situation (how many times seen, how clear) was right is counted; the one that was
right most often is believed, the longer context where two are alike. A source that never failed
counts as sure, so what repeats exactly is predicted exactly from its second round on. Where the
order is left to chance, long contexts fail, and the short ones with their counts take over.

Source: back-off as in prediction by partial matching (Cleary and Witten 1984), the match model and
the counted confidence as in context mixing (Mahoney 2005).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ORDERS = (1, 2, 4, 8)
"""Lengths of the contexts."""
_MAX_CONTEXTS = 1 << 14
"""Contexts kept per length; when there are more, the older half is forgotten."""
_MAX_HISTORY = 1 << 16
_MAX_COUNT = 64
"""Counts are halved here, so that what changed is learned anew."""
_MATCH = len(ORDERS)
_RELIABLE = 0.8


@dataclass(slots=True)
class _Successors:
    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0
    top: int = -1

    def add(self, token: int) -> None:
        counts = self.counts
        counts[token] = counts.get(token, 0) + 1
        self.total += 1
        # The younger of two that are equally frequent.
        if token != self.top and counts[token] >= counts.get(self.top, 0):
            self.top = token
        if self.total > _MAX_COUNT:
            self.counts = {key: n // 2 for key, n in counts.items() if n > 1}
            self.total = sum(self.counts.values())


class ContextModel:
    """Learns a sequence of numbers while it is observed.

    Attributes:
        tail: The last few of them.
        match: Number of the access in history that is expected to come again next, -1 for none.
        matched: How many before it came again.
    """

    def __init__(self) -> None:
        self.tail: list[int] = []
        self._tables: list[dict[Any, _Successors]] = [{} for _ in ORDERS]
        self._history = _History()
        self._places: list[dict[Any, int]] = [{} for _ in ORDERS]
        self._forgotten = 0
        self.match, self.matched = -1, 0
        self._trust: dict[tuple[int, int], list[float]] = {}

    def learn(self, token: int, *, judged: bool = True) -> None:
        """Take the next number in; unless `judged`, no guess of it counts as right or wrong."""
        tail, history = self.tail, self._history
        found = self._candidates(tail, self.match, self.matched) if judged else ()
        for order, state, guess in found:
            trust = self._trust[order, state]
            if trust[1] > _MAX_COUNT:
                trust[0] *= 0.5
                trust[1] *= 0.5
            trust[0] += guess == token
            trust[1] += 1
        for length, table in zip(ORDERS, self._tables, strict=True):
            if len(tail) < length:
                break
            key = _key(tail, length)
            found = table.get(key)
            if found is None:
                if len(table) >= _MAX_CONTEXTS:
                    _forget_half(table)
                found = table[key] = _Successors()
            found.add(token)
        if len(history) >= _MAX_HISTORY:
            self._forget_history()
        history.append(token)
        tail.append(token)
        del tail[: -ORDERS[-1]]
        self._follow(token)

    def guess(
        self, tail: Sequence[int], match: int, matched: int, beyond: Sequence[int] = ()
    ) -> tuple[int, float, bool] | None:
        """Return the most trusted successor of `tail`.

        Args:
            tail: The last accesses, real or assumed.
            match: Where in history things went on as they go now; -1 for nowhere.
            matched: For how long.
            beyond: What is assumed to follow history.

        Returns:
            The number, how often such a guess was right (0 to 1), and whether the match agrees;
            None where nothing is known.
        """
        best, likely, following, looping = -1, -1.0, -1, False
        for order, state, guess in self._candidates(tail, match, matched, beyond):
            right, tries = self._trust[order, state]
            clear = state % 9 == 8
            if order == _MATCH:
                following = guess
                # Only the match can tell how often a loop is run through.
                first = looping and matched > ORDERS[-1] and right / tries >= _RELIABLE
            else:
                looping = order == _MATCH - 1 and not clear
                first = False
            if first or right / tries >= likely:
                best, likely = guess, right / tries
        return None if best < 0 else (best, likely, best == following)

    def _candidates(
        self, tail: Sequence[int], match: int, matched: int, beyond: Sequence[int] = ()
    ) -> list[tuple[int, int, int]]:
        found = []
        trust = self._trust
        for order, length in enumerate(ORDERS):
            if len(tail) < length:
                break
            successors = self._tables[order].get(_key(tail, length))
            if successors is None:
                break  # a longer context was not seen either
            total, top = successors.total, successors.counts.get(successors.top, 0)
            if not total:
                continue
            state = 9 * total.bit_length() + 8 * top // total
            if (order, state) not in trust:
                trust[order, state] = [2.0 * top / total, 2.0]
            found.append((order, state, successors.top))
        index = match - self._forgotten
        past = index - len(self._history)
        if index >= 0 and past < len(beyond):
            state = min(matched, 255).bit_length()
            if (_MATCH, state) not in trust:
                trust[_MATCH, state] = [2.0, 2.0]
            found.append((_MATCH, state, self._history[index] if past < 0 else beyond[past]))
        return found

    def _follow(self, token: int) -> None:
        """Move the match on, or find another one; note where each context was last seen."""
        tail, history = self.tail, self._history
        index = self.match - self._forgotten
        if 0 <= index < len(history) - 1 and history[index] == token:
            self.match += 1
            self.matched += 1
        else:
            self.match, self.matched = -1, 0
        for length, places in zip(ORDERS, self._places, strict=True):
            if len(tail) < length:
                break
            key = _key(tail, length)
            place = places.get(key)
            if place is not None and length > self.matched:
                self.match, self.matched = place, length
            if place is None and len(places) >= _MAX_CONTEXTS:
                _forget_half(places)
            places[key] = self._forgotten + len(history)

    def _forget_history(self) -> None:
        self._forgotten += self._history.forget_half()


class _History:
    """A list of numbers that takes all the memory it will ever take from the beginning."""

    def __init__(self) -> None:
        self._numbers = array("q", bytes(8 * _MAX_HISTORY))
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

    def append(self, number: int) -> None:
        self._numbers[self._length] = number
        self._length += 1

    def forget_half(self) -> int:
        """Forget the older half; return how many numbers that are."""
        half = self._length // 2
        self._numbers[: self._length - half] = self._numbers[half : self._length]
        self._length -= half
        return half


def _key(tail: Sequence[int], length: int) -> Any:
    return tail[-1] if length == 1 else tuple(tail[-length:])


def _forget_half(table: dict[Any, Any]) -> None:
    for key in list(table)[: len(table) // 2]:
        del table[key]
