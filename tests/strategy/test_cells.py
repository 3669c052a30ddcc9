"""Cells of a notebook that are run again: the same names, process and directory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mt_lightning as mt
from tests.faults.nets import Net, after, assert_usable, committed_step, loader, make_trainer

MODEL = "model = Net()"
TRAIN = """
strategy = mt.MegaTrainStrategy(offload_dir=pages, on_existing=on_existing)
trainer = make_trainer(root, strategy)
trainer.fit(model, loader())
"""


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Give the global names of a notebook; nothing but the names keeps its objects."""
    found = {"mt": mt, "Net": Net, "make_trainer": make_trainer, "loader": loader}
    # Garbage of the cell before must be there still when the next one runs.
    gc.collect()
    gc.disable()
    try:
        yield {**found, "root": tmp_path, "pages": tmp_path / "pages"}
    finally:
        gc.enable()


def run(cell: str, names: dict[str, Any], on_existing: str) -> None:
    names["on_existing"] = on_existing
    exec(cell, names)


def test_a_cell_runs_again_from_the_start(names: dict[str, Any], tmp_path: Path) -> None:
    for _ in range(3):
        run(MODEL + TRAIN, names, "overwrite")
        assert_usable(names["model"], after(4, tmp_path))


def test_a_cell_runs_again_and_goes_on(names: dict[str, Any], tmp_path: Path) -> None:
    run(MODEL + TRAIN, names, "error")
    run(MODEL + TRAIN, names, "resume")
    assert names["trainer"].global_step == 4
    assert committed_step(tmp_path / "pages") == 4
    assert_usable(names["model"], after(4, tmp_path))


def test_a_model_of_another_cell_trains_on(names: dict[str, Any], tmp_path: Path) -> None:
    """Its weights are views of the very files that the second run replaces."""
    run(MODEL, names, "")
    run(TRAIN, names, "overwrite")
    run(TRAIN, names, "overwrite")
    plain = Net()
    for _ in range(2):
        make_trainer(tmp_path, "auto").fit(plain, loader())
    for one, other in zip(names["model"].parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_trained_run_is_not_thrown_away_unasked(names: dict[str, Any], tmp_path: Path) -> None:
    run(MODEL + TRAIN, names, "error")
    with pytest.raises(mt.ConfigError, match=r"on_existing='resume'.*on_existing='overwrite'"):
        run(MODEL + TRAIN, names, "error")
    assert committed_step(tmp_path / "pages") == 4
