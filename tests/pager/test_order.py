"""The order of visits is learned from one step and guessed in the next."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from mt_lightning.pager.order import LearnedOrder

FORWARD = [0, 1, 2, 3]
STEP = [*FORWARD, *reversed(FORWARD)]


def learned(*visits: int) -> LearnedOrder:
    order = LearnedOrder()
    for unit in visits:
        order.observe(unit)
    order.end_of_step()
    return order


def test_nothing_is_guessed_in_the_first_step() -> None:
    order = LearnedOrder()
    assert order.predict(3) == []
    order.observe(0)
    assert order.predict(3) == []
    order.end_of_step()
    assert order.predict(3) == [0]


def test_forward_then_backward() -> None:
    order = learned(*STEP)
    guesses = []
    for unit in STEP:
        order.observe(unit)
        guesses.append(order.predict(2))
    # Distinct units, nearest first: the last unit of the forward is the first of the backward, and
    # the end of a step is followed by the next one.
    assert guesses == [[1, 2], [2, 3], [3, 2], [3, 2], [2, 1], [1, 0], [0, 1], [0, 1]]


def test_several_micro_batches_in_a_step() -> None:
    order = learned(*STEP, *STEP)
    for unit in STEP:
        order.observe(unit)
    assert order.predict(4) == [0, 1, 2, 3]


def test_how_many() -> None:
    order = learned(*STEP)
    assert order.predict(0) == []
    assert order.predict(-1) == []
    assert order.predict(99) == FORWARD


def test_a_unit_that_is_left_out() -> None:
    order = learned(*STEP)
    for unit in (0, 2):
        order.observe(unit)
    assert order.predict(2) == [3, 2]


def test_a_unit_that_is_new() -> None:
    order = learned(*STEP)
    order.observe(0)
    order.observe(7)
    assert order.predict(2) == [1, 2]
    order.end_of_step()
    assert order.predict(2) == [0, 7]


def test_a_step_without_visits_is_no_lesson() -> None:
    order = learned(*STEP)
    order.end_of_step()
    assert order.predict(2) == [0, 1]


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=12), max_size=4),
    st.integers(0, 8),
)
def test_guesses_are_harmless(steps: list[list[int]], count: int) -> None:
    order, known = LearnedOrder(), []
    for visits in steps:
        for unit in visits:
            order.observe(unit)
            guess = order.predict(count)
            assert len(guess) == len(set(guess)) == min(count, len(set(known)))
            assert set(guess) <= set(known)
        order.end_of_step()
        known = visits or known


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_what_repeats_is_guessed_right(visits: list[int]) -> None:
    order = learned(*visits)
    for unit, following in zip(visits, [*visits[1:], visits[0]], strict=True):
        order.observe(unit)
        assert order.predict(1) == [following]
