"""The units whose graphs are kept are chosen before they run, last ones first."""

from __future__ import annotations

from mt_lightning.engine.graphs.choice import Choice


def run(choice: Choice, sizes: dict[int, int], size: int = 100) -> list[int]:
    """Run a pass; return the units that were wanted. All tell what they took."""
    wanted = [unit for unit in sizes if choice.wants(unit, size)]
    for unit in wanted:
        choice.saw(unit, sizes[unit])
    choice.end_pass()
    return wanted


def test_everything_is_tried_once() -> None:
    assert run(Choice(10), {0: 4, 1: 4, 2: 4, 3: 4}) == [0, 1, 2, 3]


def test_the_last_ones_are_kept() -> None:
    choice, sizes = Choice(10), {0: 4, 1: 4, 2: 4, 3: 4}
    run(choice, sizes)
    assert run(choice, sizes) == [2, 3]
    assert run(choice, sizes) == [2, 3]


def test_one_that_is_too_large_does_not_keep_others_out() -> None:
    choice, sizes = Choice(10), {0: 4, 1: 4, 2: 40, 3: 1}
    run(choice, sizes)
    assert run(choice, sizes) == [0, 1, 3]


def test_a_larger_batch_is_expected_to_take_more() -> None:
    choice, sizes = Choice(16), {0: 4, 1: 4, 2: 4, 3: 4}
    run(choice, sizes)
    assert run(choice, sizes) == [0, 1, 2, 3]
    assert run(choice, {unit: 2 * nbytes for unit, nbytes in sizes.items()}, 200) == [2, 3]
    assert run(choice, sizes) == [0, 1, 2, 3]


def test_a_unit_that_runs_twice_takes_both() -> None:
    choice = Choice(10)
    for _ in range(2):
        for unit in (0, 1, 0):
            choice.wants(unit, 100)
            choice.saw(unit, 4)
        choice.end_pass()
    assert [unit for unit in (0, 1) if choice.wants(unit, 100)] == [0]


def test_a_unit_that_is_new_is_tried() -> None:
    choice = Choice(10)
    run(choice, {0: 5, 1: 5})
    assert run(choice, {0: 5, 1: 5, 2: 5}) == [0, 1, 2]
    assert run(choice, {0: 5, 1: 5, 2: 5}) == [1, 2]
