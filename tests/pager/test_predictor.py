"""What repeats is predicted exactly from its second round on; what does not costs no error."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mt_lightning.pager import contexts
from mt_lightning.pager import predictor as predictor_module
from mt_lightning.pager.predictor import BACKWARD, FORWARD, INFERENCE, Predictor

Access = tuple[int, int]


def train(*route: int) -> list[Access]:
    return [(u, FORWARD) for u in route] + [(u, BACKWARD) for u in reversed(route)]


def evaluate(*route: int) -> list[Access]:
    return [(u, INFERENCE) for u in route]


LAYERS = range(6)
ROUNDS: dict[str, list[list[Access]]] = {
    "one_batch": [train(*LAYERS)],
    "four_micro_batches": [train(*LAYERS) * 4],
    "evaluation_in_between": [train(*LAYERS)] * 3 + [evaluate(*LAYERS) * 4],
    "training_and_evaluation_in_turn": [train(*LAYERS), evaluate(*LAYERS)],
    "called_twice_in_a_row": [train(0, 1, 1, 2, 3, 3, 4)],
    "called_twice_far_apart": [train(0, 1, 2, 3, 1, 2, 4)],
    "one_layer_twelve_times": [train(0, *[1] * 12, 2)],
    "three_layers_twelve_times": [train(0, *[1, 2, 3] * 12, 4)],
    "two_towers_in_turn": [train(0, 1, 2, 8), train(4, 5, 6, 7, 8)],
    "frozen_below": [train(*LAYERS)[:9]],
    "last_unit_differentiated_at_once": [train(*LAYERS)[:6] + train(*LAYERS)[7:]],
    "frozen_tower_without_gradients": [
        [(0, FORWARD), (1, INFERENCE), (2, INFERENCE), *train(3, 4), (0, BACKWARD)]
    ],
}


def guesses(predictor: Predictor, steps: Sequence[Sequence[Access]]) -> list[int | None]:
    """Return what was expected before each access."""
    found = []
    for step in steps:
        for unit, kind in step:
            found.append(next(predictor.upcoming(), None))
            predictor.observe(unit, kind)
        predictor.end_of_step()
    return found


@pytest.mark.parametrize("case", ROUNDS)
def test_what_repeats_is_predicted_from_the_second_round_on(case: str) -> None:
    rounds = ROUNDS[case]
    visits = [unit for step in rounds for unit, _ in step]
    predictor = Predictor()
    guesses(predictor, rounds)
    # The first access of the second round, and of a kind of step that follows itself only, has
    # never been seen to follow.
    assert guesses(predictor, rounds)[1:] == visits[1:]
    for _ in range(20):
        assert guesses(predictor, rounds) == visits


@pytest.mark.parametrize("case", ["one_batch", "four_micro_batches", "called_twice_in_a_row"])
def test_backward_is_predicted_from_the_first_step_on(case: str) -> None:
    (step,) = ROUNDS[case]
    predictor = Predictor()
    found = guesses(predictor, [step])
    for place in range(1, len(step)):
        if step[place][1] == step[place - 1][1] == BACKWARD:
            assert found[place] == step[place][0]


def test_backward_is_predicted_whatever_way_forward_took() -> None:
    predictor = Predictor()
    for route in ([0, 1, 2, 3], [0, 3], [0, 2, 3], [0, 1, 3, 5], [0]):
        step = train(*route)
        found = guesses(predictor, [step])
        behind_turn = len(route) + 1
        assert found[behind_turn:] == [unit for unit, _ in step[behind_turn:]]


def test_evaluation_goes_the_way_that_training_went() -> None:
    predictor = Predictor()
    guesses(predictor, [train(*LAYERS)])
    assert guesses(predictor, [evaluate(*LAYERS)])[1:] == list(LAYERS)[1:]
    predictor = Predictor()
    guesses(predictor, [evaluate(*LAYERS)])
    assert guesses(predictor, [train(*LAYERS)])[1:6] == list(LAYERS)[1:]


def test_distances_are_exact_once_the_order_is_known() -> None:
    predictor = Predictor()
    step = train(*LAYERS)
    guesses(predictor, [step, step])
    future = [unit for unit, _ in step] * 2
    for place, (unit, kind) in enumerate(step):
        predictor.observe(unit, kind)
        for other in LAYERS:
            assert predictor.next_use(other) == future.index(other, place + 1) - place - 1


def test_what_was_never_used_is_infinitely_far() -> None:
    predictor = Predictor()
    assert predictor.next_use(7) == math.inf
    guesses(predictor, [train(*LAYERS)])
    assert predictor.next_use(7) == math.inf
    assert list(predictor.upcoming()) == []


def test_a_new_order_is_learned_within_few_rounds() -> None:
    predictor = Predictor()
    guesses(predictor, [train(*LAYERS)] * 50)
    other = train(0, 2, 4, 1, 3, 5)
    visits = [unit for unit, _ in other]
    for _ in range(3):
        found = guesses(predictor, [other])
    assert found == visits


def test_a_rare_unit_is_farther_than_a_frequent_one() -> None:
    predictor = Predictor()
    for number in range(60):
        guesses(predictor, [train(0, 1, *([2] if number % 7 == 0 else [3]), 4)])
    predictor.observe(0, FORWARD)
    assert predictor.next_use(2) > predictor.next_use(3)
    assert predictor.next_use(2) > predictor.next_use(4)


@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=20), max_size=6))
@settings(deadline=None, max_examples=25)
def test_any_order_is_harmless(steps: list[list[Access]]) -> None:
    predictor, seen = Predictor(), set()
    for step in steps:
        for unit, kind in step:
            predictor.observe(unit, kind)
            seen.add(unit)
            expected = list(predictor.upcoming())
            assert len(expected) == len(set(expected))
            assert set(expected) <= seen
            assert all(predictor.next_use(other) >= 0 for other in range(8))
            if expected:
                assert predictor.next_use(expected[0]) <= predictor.next_use(7)
        predictor.end_of_step()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
@settings(deadline=None, max_examples=40)
def test_any_route_that_repeats_is_learned(route: list[int]) -> None:
    predictor = Predictor()
    step = train(*route)
    guesses(predictor, [step] * 3)
    for _ in range(5):
        assert guesses(predictor, [step]) == [unit for unit, _ in step]


def test_memory_stays_bounded_and_old_orders_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_MAX_HISTORY", 1 << 10)
    monkeypatch.setattr(contexts, "_MAX_CONTEXTS", 1 << 8)
    predictor = Predictor()
    step = train(*range(40))
    visits = [unit for unit, _ in step]
    for _ in range(60):
        found = guesses(predictor, [step])
    assert found == visits
    model = predictor._contexts
    for number in range(300):
        guesses(predictor, [train(*[(number * k) % 97 for k in (1, 3, 7, 12)])])
        assert len(model._history) <= 1 << 10
        assert all(len(table) <= 1 << 8 for table in (*model._tables, *model._places))
        assert len(predictor._ahead) <= 1 << 12
    guesses(predictor, [step] * 3)
    assert guesses(predictor, [step]) == visits


def test_an_access_costs_microseconds() -> None:
    predictor = Predictor()
    step = train(*range(80))
    guesses(predictor, [step] * 3)
    begin = time.process_time()
    guesses(predictor, [step] * 10)
    # 10 to 20 us on a quiet core; the bound only tells it from a cost that grows with the model.
    assert (time.process_time() - begin) / (10 * len(step)) < 500e-6


def test_a_small_model_is_not_looked_at_again_and_again() -> None:
    predictor = Predictor()
    step = train(0, 1, 2)
    for unit, kind in step * 50:
        predictor.observe(unit, kind)
        assert set(predictor.upcoming()) == {0, 1, 2} or predictor._now < 3 * len(step)
        # What repeats is known to no end, but behind one round there is no other unit.
        assert len(predictor._ahead) <= 2 * len(step)


def test_what_never_comes_again_is_not_looked_for_in_every_round_to_come() -> None:
    predictor, only_validated = Predictor(), 9
    for access in [*evaluate(only_validated), *train(*LAYERS) * 20]:
        predictor.observe(*access)
    assert predictor.next_use(only_validated) > 2 * len(LAYERS)
    assert set(predictor.upcoming()) == set(LAYERS)
    assert len(predictor._ahead) <= predictor_module._MAX_ROUNDS * (len(LAYERS) + 1)
