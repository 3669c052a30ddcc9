"""A pairwise cover: few rows in which every allowed pair of values of two factors occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Assignment = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
IsAllowed = Callable[[Assignment], bool]
NeedsCover = Callable[[str, str], bool]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise_cover(
    factors: Factors,
    is_allowed: IsAllowed,
    needs_cover: NeedsCover = lambda first, second: True,
) -> list[Assignment]:
    """Cover all allowed pairs greedily; the result depends on nothing but the arguments.

    Each row starts from the first pair that is still uncovered. The other factors follow, each with
    the value that covers most new pairs; ties go to the earlier value.

    Args:
        factors: The values of each factor.
        is_allowed: Judges a partial assignment. It must allow some completion of what it allows.
        needs_cover: Says of two factors whether the pairs of their values matter.
    """
    uncovered = dict.fromkeys(
        pair for pair in allowed_pairs(factors, is_allowed) if needs_cover(pair[0][0], pair[1][0])
    )
    rows = []
    while uncovered:
        row = _complete(dict(next(iter(uncovered))), factors, is_allowed, uncovered)
        for pair in pairs_of(row, factors):
            uncovered.pop(pair, None)
        rows.append(row)
    return rows


def allowed_pairs(factors: Factors, is_allowed: IsAllowed) -> list[Pair]:
    """Return every pair of values of two factors that is allowed together."""
    return [
        pair
        for first, second in combinations(factors, 2)
        for pair in product(
            [(first, value) for value in factors[first]],
            [(second, value) for value in factors[second]],
        )
        if is_allowed(dict(pair))
    ]


def pairs_of(row: Assignment, factors: Factors) -> list[Pair]:
    """Return the pairs that a (partial) row covers."""
    return list(combinations([(name, row[name]) for name in factors if name in row], 2))


def _complete(
    row: Assignment, factors: Factors, is_allowed: IsAllowed, uncovered: Mapping[Pair, None]
) -> Assignment:
    for name in factors:
        if name in row:
            continue
        candidates = [value for value in factors[name] if is_allowed({**row, name: value})]
        row[name] = max(
            candidates,
            key=lambda value, name=name: sum(
                pair in uncovered
                for pair in pairs_of({**row, name: value}, factors)
                if (name, value) in pair
            ),
        )
    return row
