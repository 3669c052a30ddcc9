"""Batches that run together give, bit for bit, what plain Lightning gives one after the other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from mt_lightning import MegaTrainStrategy
from mt_lightning.engine.window.forward import ForwardWindow
from mt_lightning.errors import BudgetError

from ..parity import zoo
from . import networks as nets
from .evaluate import Batch, assert_equal, evaluate, loader, paged

VARIED = nets.tokens(9, [9, 16, 12, 5])
CASES: dict[str, tuple[Callable[[], nn.Module], list[Batch]]] = {
    "branching": (nets.Branching, VARIED),
    "flag_toggled_around_the_pass": (nets.Flagged, VARIED),
    "loss_stashed_on_modules": (nets.Stashing, VARIED),
    "packed": (nets.zoo_model("llama"), nets.packed(9)),
    **{
        name: (nets.zoo_model(name, dropout=0.1), zoo.batches(name, 9, seed=2))
        for name in zoo.MODELS
    },
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices"),
    pytest.mark.filterwarnings("ignore:Total length of `DataLoader` across ranks is zero"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")
    torch.set_num_threads(1)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches ran together, each time."""
    sizes: list[int] = []
    run = ForwardWindow.run

    def noted(self: ForwardWindow, num_steps: int | None = None) -> None:
        sizes.append(len(self.steps[:num_steps]))
        run(self, num_steps)

    monkeypatch.setattr(ForwardWindow, "run", noted)
    return sizes


def check(
    directory: Path, kind: str, make: Callable[[], nn.Module], make_loaders: Any, **settings: Any
) -> Any:
    """Compare both orders; return the strategy of the paged run."""
    layer_major = settings.pop("layer_major", True)
    strategy = paged(make(), layer_major, settings.pop("share", 0.75))
    expected = evaluate(directory, kind, make, make_loaders(), None, **settings)
    found = evaluate(directory, kind, make, make_loaders(), strategy, **settings)
    assert_equal(expected, found)
    return strategy


@pytest.mark.parametrize("case", CASES)
def test_models(case: str, tmp_path: Path, groups: list[int]) -> None:
    make, batches = CASES[case]
    if case == "convnet":
        # A unit of most of its weights leaves room for nothing else.
        strategy = paged(make(), True, 0.9)
        expected = evaluate(tmp_path, "validate", make, loader(batches), None)
        assert_equal(expected, evaluate(tmp_path, "validate", make, loader(batches), strategy))
        return
    check(tmp_path, "validate", make, lambda: loader(batches))
    assert max(groups) > 1


SETTINGS: dict[str, dict[str, Any]] = {
    "inference_mode": {"inference_mode": False},
    "auto": {"layer_major": "auto"},
    "limits": {"limit_val_batches": 4, "limit_test_batches": 0.5, "limit_predict_batches": 3},
    "precision": {"precision": "bf16-mixed"},
    "profiler": {"profiler": "simple"},
    "fast_dev_run": {"fast_dev_run": 3},
}


def settings_and_kinds() -> Iterator[Any]:
    """Yield all of them; each limit runs always, of the others each setting with one kind."""
    for i, name in enumerate(SETTINGS):
        for j, kind in enumerate(("validate", "test", "predict")):
            often = name == "limits" or i % 3 == j
            yield pytest.param(kind, name, marks=[] if often else [pytest.mark.slow])


@pytest.mark.parametrize(("kind", "name"), list(settings_and_kinds()))
def test_settings(kind: str, name: str, tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, kind, nets.Tiny, lambda: loader(VARIED), **SETTINGS[name])
    assert max(groups) > 1


@pytest.mark.parametrize("kind", ["validate", "predict"])
def test_several_loaders(kind: str, tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, kind, nets.Tiny, lambda: [loader(VARIED[:5]), loader(VARIED[5:]), loader([])])
    # The first batch runs alone, and no group spans two loaders.
    assert groups == [1, 4, 4]


class Stream(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return iter(VARIED)


@pytest.mark.parametrize("kind", ["test", "predict"])
def test_a_loader_without_a_length(kind: str, tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, kind, nets.Tiny, lambda: DataLoader(Stream(), batch_size=None))
    assert groups == [1, 8]


def test_a_loader_that_draws_random_numbers(tmp_path: Path, groups: list[int]) -> None:
    def noisy(batch: Batch) -> Batch:
        return {**batch, "labels": torch.randint(0, 100, batch["labels"].shape)}

    make_loader = functools.partial(loader, VARIED, shuffle=True, collate_fn=noisy)
    check(tmp_path, "validate", nets.Tiny, make_loader)
    assert max(groups) > 1


def test_prediction_writers_get_the_indices_of_their_batch(tmp_path: Path) -> None:
    data = [{key: value[0] for key, value in batch.items()} for batch in nets.tokens(9, [7])]

    def make_loader() -> Any:
        return DataLoader(data, batch_size=2)  # type: ignore[arg-type]

    check(tmp_path, "predict", nets.Tiny, make_loader)
    check(tmp_path, "predict", nets.Tiny, lambda: [make_loader(), make_loader()])


def smallest_gb(directory: Path, make: Callable[[], nn.Module]) -> float:
    with pytest.raises(BudgetError) as refusal:
        evaluate(directory, "test", make, loader(VARIED), MegaTrainStrategy(max_ram_gb=1e-5))
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb


def test_small_budgets(tmp_path: Path, groups: list[int]) -> None:
    """From the smallest budget on, in which no two batches fit, memory stays within the limit."""
    make = functools.partial(nets.Tiny, num_layers=6)
    smallest = smallest_gb(tmp_path, make)
    expected = evaluate(tmp_path, "test", make, loader(VARIED), None)
    largest: list[int] = []
    for more_kib in (0, 50, 200):
        groups.clear()
        limit_gb = smallest + more_kib / 2**20
        strategy = MegaTrainStrategy(max_ram_gb=limit_gb)
        assert_equal(expected, evaluate(tmp_path, "test", make, loader(VARIED), strategy))
        assert strategy.engine is not None
        assert strategy.engine.stats.ram_peak_bytes <= limit_gb * 2**30
        assert sum(groups) == len(VARIED)
        largest.append(max(groups))
    assert largest[0] == 1
    assert largest == sorted(set(largest))


def test_nothing_is_held_back_where_all_weights_fit(tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), share=1.5)
    assert groups == []


def test_false_is_the_usual_order(tmp_path: Path, groups: list[int]) -> None:
    check(tmp_path, "validate", nets.Tiny, lambda: loader(VARIED), layer_major=False)
    assert groups == []
