"""Every row: the paged run equals the plain one, bit for bit, and its pages really moved."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from .flows import RoundingError
from .outcome import assert_equal
from .recipe import Recipe
from .rows import Row, covering_rows, product_rows, wide_rows
from .runs import paged_outcome, plain_outcome, refused_gb, smallest_gb

COVER = covering_rows()

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    # rows with `none_sometimes` and with manual optimisation
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]


@pytest.fixture(autouse=True)
def quiet_lightning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")


@pytest.mark.parametrize("row", COVER, ids=lambda row: row.name)
def test_pairwise_cover(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Thousands of rows, which take seconds to list.
    more = {test_wide_cover: wide_rows, test_full_product: product_rows}.get(metafunc.function)
    if more is not None:
        is_asked_for = metafunc.config.getoption("--slow")
        rows = [row for row in more() if row not in set(COVER)] if is_asked_for else []
        metafunc.parametrize("row", rows, ids=lambda row: row.name)


@pytest.mark.slow
def test_wide_cover(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.slow
def test_full_product(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.parametrize("model", ["gpt", "qwen3_moe", "t5", "convnet"])
def test_five_percent_less_than_the_smallest_budget_is_refused(model: str) -> None:
    # That the smallest itself works is what the rows show.
    row = Row(recipe=Recipe(model=model))
    smallest = smallest_gb(row)
    assert refused_gb(row, 0.95 * smallest) == smallest


def check(row: Row, directory: Path) -> None:
    expected = plain_outcome(row.recipe)
    try:
        actual, paging = paged_outcome(row, directory)
    except RoundingError:
        # It was found and named; every bit is what the usual order promises.
        (directory / "usual").mkdir()
        actual, paging = paged_outcome(row, directory / "usual", layer_major=False)
    assert_equal(expected, actual)
    assert paging.strategies, "nothing was paged"
    if row.budget != "fits":
        assert paging.total("evictions") > 0, "no page ever left memory"
        assert paging.total("reloads") > 0, "no page ever came back"
    if row.recompute == "always":
        assert not paging.total("graphs_kept")
    elif row.budget == "fits":
        assert paging.total("graphs_kept"), "no graph was ever kept"
    if row.recipe.is_eager is not None:
        is_eager = row.recipe.is_eager and row.durability == "step"
        assert paging.schedules == {"eager" if is_eager else "deferred"}
