"""Prediction against LRU and an oracle that knows the future, with equal frames."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mt_lightning import AccessRecorder, MegaTrainStrategy
from mt_lightning.cli import main
from mt_lightning.commands.bench.replay import (
    play_ahead,
    play_lru,
    play_oracle,
    play_predicted,
)
from mt_lightning.commands.bench.traces import GENERATORS, Trace, generate, load
from mt_lightning.errors import ConfigError
from mt_lightning.pager.predictor import BACKWARD, FORWARD, INFERENCE

NUM_STEPS = {"layer-drop": 60, "early-exit": 40, "random-towers": 40, "experts": 24}
STATIC = ("static", "accumulate", "validation", "towers")
BY_CHANCE = ("layer-drop", "early-exit", "random-towers", "experts")
# What is kept, against the oracle, at a quarter, a half and three quarters of the units. The route
# of a step is drawn by chance and no one but the oracle knows it: see docs/prefetch.md.
LEAST_KEPT = {
    "layer-drop": (0.89, 0.88, 0.92),
    "early-exit": (0.99, 0.99, 0.99),
    "random-towers": (0.88, 0.95, 0.97),
    "experts": (0.84, 0.93, 0.94),
}


def frames(trace: Trace, share: float) -> int:
    return int(share * trace.num_units)


@pytest.mark.parametrize("name", STATIC)
def test_what_repeats_is_kept_as_well_as_by_the_oracle(name: str) -> None:
    trace = generate(name, 24, 0)
    for share in (0.25, 0.5, 0.75):
        predicted, oracle = (
            play(trace, frames(trace, share)) for play in (play_predicted, play_oracle)
        )
        assert predicted.hits == oracle.hits
        ahead = play_ahead(trace, frames(trace, share), 2)
        assert ahead.hit_rate == 1.0
        assert ahead.wasted == 0
        assert ahead.reads <= 1.03 * oracle.reads


@pytest.mark.parametrize("name", BY_CHANCE)
def test_what_depends_on_data_is_there_in_time(name: str) -> None:
    trace = generate(name, NUM_STEPS[name], 0)
    for share, least in zip((0.25, 0.5, 0.75), LEAST_KEPT[name], strict=True):
        num_frames = frames(trace, share)
        lru, oracle, predicted = (
            play(trace, num_frames) for play in (play_lru, play_oracle, play_predicted)
        )
        assert predicted.hits >= least * oracle.hits
        # LRU is optimal where each forward is the beginning of the next.
        assert predicted.hits > lru.hits or lru.hits == oracle.hits
        ahead = play_ahead(trace, num_frames, 4)
        assert ahead.hit_rate > lru.hit_rate
        if name == "experts":
            # Which experts come is not known; what is likely is in RAM. So little is read ahead.
            assert ahead.hits >= 0.98 * predicted.hits
            assert ahead.reads <= 1.1 * predicted.reads
        else:
            assert ahead.hit_rate >= 0.95, "an oracle that reads ahead misses nothing"


def test_pure_chance_is_not_read_ahead_and_costs_little_more_than_lru() -> None:
    trace = generate("chance", 40, 0)
    for share in (0.25, 0.5, 0.75):
        lru, predicted = (play(trace, frames(trace, share)) for play in (play_lru, play_predicted))
        assert predicted.hits >= 0.9 * lru.hits
        ahead = play_ahead(trace, frames(trace, share), 4)
        assert ahead.used + ahead.wasted <= 0.02 * ahead.accesses, "what cannot be predicted"
        assert ahead.reads <= 1.02 * predicted.reads


def test_the_oracle_is_the_best_there_is() -> None:
    """Against every way to choose, on a trace that is short enough to try them all."""
    draw = random.Random(0)
    for _ in range(20):
        units = [draw.randrange(4) for _ in range(10)]
        trace = Trace("short", [[(units[0], INFERENCE)], [(u, INFERENCE) for u in units[1:]]])

        def best(held: frozenset[int], place: int, units: list[int] = units) -> int:
            if place == len(units):
                return 0
            unit = units[place]
            if unit in held:
                return 1 + best(held, place + 1)
            if len(held) < 2:
                return best(held | {unit}, place + 1)
            return max(best(held - {other} | {unit}, place + 1) for other in held)

        assert play_oracle(trace, 2).hits == best(frozenset(), 0)


@pytest.mark.parametrize("name", GENERATORS)
def test_traces_are_the_same_each_time(name: str) -> None:
    assert generate(name, 5, 1) == generate(name, 5, 1)
    if name in BY_CHANCE:
        assert generate(name, 5, 1) != generate(name, 5, 2)


def test_results_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "prefetch", "--trace", "static", "towers", "--steps", "8"]
    assert main([*command, "--frames", "0.5", "--json"]) == 0
    static, towers = json.loads(capsys.readouterr().out)
    assert (static["trace"], static["units"], static["frames"]) == ("static", 32, 16)
    assert static["lru"] == static["predicted"] == static["oracle"] == 0.5
    assert (static["in_time"], static["precision"], static["reads"]) == (1, 1, 1)
    assert towers["lru"] < 0.99 * towers["oracle"] < towers["predicted"]
    assert main([*command, "--frames", "0.25", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "static" in shown
    assert "towers" in shown


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--frames", "0"], "--frames"),
        (["--frames", "1.5"], "1.5"),
        (["--steps", "3"], "--steps"),
        (["--depth", "0"], "--depth"),
        (["--file", "absent.json"], "absent.json"),
    ],
)
def test_wrong_settings_are_refused(
    wrong: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prefetch", *wrong]) == 2
    assert text in capsys.readouterr().err


class Skipping(pl.LightningModule):
    """Leaves layers out as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = batch
        for index, layer in enumerate(self.layers):
            if batch_idx % 2 == 0 or index in (0, 3):
                x = layer(x)
        return x.pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layers[2](batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path: Path, recorder: AccessRecorder, **settings: Any) -> None:
    data = DataLoader(torch.randn(4, 64), batch_size=1)
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        callbacks=[recorder],
        **settings,
    ).fit(Skipping(), data, DataLoader(torch.randn(1, 64)))


def test_a_run_is_recorded_and_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "skipping.json"
    fit(tmp_path, AccessRecorder(path), strategy=MegaTrainStrategy(tmp_path / "pages"))
    whole = [(u, FORWARD) for u in range(4)] + [(u, BACKWARD) for u in (3, 2, 1, 0)]
    short = [(0, FORWARD), (3, FORWARD), (3, BACKWARD), (0, BACKWARD)]
    validated = [(2, INFERENCE)]
    trace = load(str(path))
    assert trace.steps[:3] == [whole, short, whole]
    assert [a for step in trace.steps[3:] for a in step] == [*short, *validated]
    assert json.loads(path.read_text())["units"] == [f"layers.{index}" for index in range(4)]
    assert main(["bench", "prefetch", "--file", str(path), "--json"]) == 0
    assert {row["trace"] for row in json.loads(capsys.readouterr().out)} == {"skipping"}


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"AccessRecorder.*strategy='megatrain'"):
        fit(tmp_path, AccessRecorder(tmp_path / "trace.json"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"units": ["a"], "steps": [[[0, 0]], [[1, 0]]]}',
        '{"units": ["a"], "steps": [[[0, 0]], [[0, 7]]]}',
        '{"units": ["a"], "steps": [[[0, 0]]]}',
        '{"units": ["a"], "steps": [[[0]], [0]]}',
    ],
)
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.json"):
        load(str(path))
