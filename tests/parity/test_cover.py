"""The selection of rows: a true pairwise cover, of rows that can run."""

from __future__ import annotations

from itertools import pairwise, product

from .cover import allowed_pairs, pairs_of, pairwise_cover
from .rows import (
    PLACE_FACTORS,
    RECIPE_FACTORS,
    covering_assignments,
    covering_rows,
    is_allowed,
    needs_cover,
    product_rows,
    wide_rows,
)

FACTORS = {**RECIPE_FACTORS, **PLACE_FACTORS}


def test_rows_cover_every_allowed_pair() -> None:
    covered = {pair for row in covering_assignments() for pair in pairs_of(row, FACTORS)}
    needed = [
        pair for pair in allowed_pairs(FACTORS, is_allowed) if needs_cover(pair[0][0], pair[1][0])
    ]
    assert [pair for pair in needed if pair not in covered] == []


def test_rows_are_allowed_few_and_always_the_same() -> None:
    assert all(is_allowed(row) for row in covering_assignments())
    assert len(covering_rows()) < 60 < len(wide_rows()) < 90
    assert [row.name for row in covering_rows()] == [row.name for row in covering_rows()]


def test_names_are_unique() -> None:
    for rows in (covering_rows(), wide_rows(), product_rows()):
        assert len({row.name for row in rows}) == len(rows)


def test_product_keeps_equal_recipes_together() -> None:
    # Few plain outcomes are remembered at a time.
    recipes = [row.recipe for row in product_rows()]
    changes = sum(before != after for before, after in pairwise(recipes))
    assert changes + 1 == len(set(recipes))


def test_cover_of_three_small_factors() -> None:
    factors = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1)}

    def is_fine(row: dict[str, int]) -> bool:
        return not (row.get("a") == 1 and row.get("b") == 2)

    rows = pairwise_cover(factors, is_fine)
    assert all(is_fine(row) for row in rows)
    for first, second in (("a", "b"), ("a", "c"), ("b", "c")):
        expected = set(product(factors[first], factors[second])) - (
            {(1, 2)} if (first, second) == ("a", "b") else set()
        )
        assert {(row[first], row[second]) for row in rows} == expected
    assert len(rows) <= 10
