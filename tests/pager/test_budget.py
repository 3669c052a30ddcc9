"""Bytes are reserved before they are allocated, and given back once."""

from __future__ import annotations

import pytest

from mt_lightning.pager.budget import Budget


def test_reserve_and_free() -> None:
    budget = Budget(100)
    weights, grads = budget.reserve(60, "weights"), budget.reserve(40, "gradients")
    assert (budget.used_bytes, budget.available_bytes, budget.peak_bytes) == (100, 0, 100)
    assert dict(budget.by_purpose) == {"weights": 60, "gradients": 40}
    weights.free()
    assert (budget.used_bytes, budget.available_bytes, budget.peak_bytes) == (40, 60, 100)
    assert budget.by_purpose["weights"] == 0
    grads.free()
    assert budget.used_bytes == 0


def test_freeing_twice_gives_back_once() -> None:
    budget = Budget(100)
    first, second = budget.reserve(30, "weights"), budget.reserve(30, "weights")
    first.free()
    first.free()
    assert budget.used_bytes == 30
    assert budget.by_purpose["weights"] == 30
    second.free()
    assert budget.used_bytes == 0


def test_more_than_is_available_is_a_bug() -> None:
    budget = Budget(100)
    budget.reserve(99, "weights")
    with pytest.raises(AssertionError, match="gradients"):
        budget.reserve(2, "gradients")
    assert budget.used_bytes == 99
    budget.reserve(1, "gradients")


def test_nothing_can_be_reserved() -> None:
    budget = Budget(0)
    budget.reserve(0, "gradients").free()
    assert budget.available_bytes == 0
