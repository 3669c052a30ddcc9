"""A run that is interrupted and resumed is the run that was never interrupted, bit for bit."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from mt_lightning import ConfigError, CorruptPageError, MegaTrainStrategy

from .run import Tokens, Told, assert_goes_on_as, interrupt, paged, resume, train


@functools.cache
def straight(**settings: Any) -> Told:
    """Train plainly and without an interruption; once for equal settings."""
    return train("auto", **settings)


STOPS = {
    "first batch": 1,
    "mid-epoch": 6,
    "validation due": 8,
    "epoch end due": 11,
    "second epoch": 14,
    "last step": 16,
}


def stops_and_workers() -> Iterator[Any]:
    """Yield every stop without and with worker processes; most of the latter only with --slow."""
    for name, stop in STOPS.items():
        yield pytest.param(stop, 0, id=f"{name}-0")
        seldom = name not in ("mid-epoch", "epoch end due")
        yield pytest.param(stop, 2, id=f"{name}-2", marks=[pytest.mark.slow] if seldom else [])


@pytest.mark.parametrize(("stop", "workers"), list(stops_and_workers()))
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, stop: int, workers: int
) -> None:
    expected = straight(workers=workers)
    interrupt(tmp_path, stop, {}, workers=workers)
    assert assert_goes_on_as(expected, resume(tmp_path, {}, workers=workers)) == stop


RUNS: dict[str, dict[str, Any]] = {
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 9},
    "accumulated and clipped": {
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.5,
        "max_steps": 5,
    },
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "noisy workers": {"noisy": True, "workers": 2},
    "bf16": {"precision": "bf16-mixed"},
}


def kinds_and_stops() -> Iterator[Any]:
    """Yield every kind with every stop; each runs with one of them always, the rest by --slow."""
    for i, kind in enumerate(RUNS):
        for stop in (6, 11, 14):
            marks = [] if stop == (6, 14)[i % 2] else [pytest.mark.slow]
            yield pytest.param(kind, stop, id=f"{kind}-{stop}", marks=marks)


@pytest.mark.parametrize(("kind", "stop"), list(kinds_and_stops()))
def test_whatever_the_run_is(tmp_path: Path, kind: str, stop: int) -> None:
    expected = straight(**RUNS[kind])
    interrupt(tmp_path, stop, {}, **RUNS[kind])
    skipped = assert_goes_on_as(expected, resume(tmp_path, {}, **RUNS[kind]))
    window = RUNS[kind].get("accumulate_grad_batches", 1)
    assert stop - window < skipped <= stop


@pytest.mark.parametrize("compression", ["lossless", "m8v8", "R1", True])
def test_whatever_form_the_state_has(tmp_path: Path, compression: Any) -> None:
    paging = {"optimizer_compression": compression}
    expected = train(paged(tmp_path / "straight", **paging))
    interrupt(tmp_path / "run", 7, paging)
    assert assert_goes_on_as(expected, resume(tmp_path / "run", paging)) == 7


@pytest.mark.parametrize(
    ("look", "compression"), [("validate", False), ("test", "R1"), ("predict", "lossless")]
)
def test_an_evaluation_in_between_changes_nothing(
    tmp_path: Path, look: str, compression: Any
) -> None:
    paging = {"optimizer_compression": compression}
    lossy = compression == "R1"
    expected = train(paged(tmp_path / "straight", **paging)) if lossy else straight()
    module = train(paged(tmp_path / "run", **paging), stop=7)
    module.test_step = module.validation_step  # type: ignore[method-assign]
    module.predict_step = lambda batch: module(batch)  # type: ignore[method-assign]
    loader = DataLoader(Tokens(4, False), batch_size=2)
    getattr(module.trainer, look)(module, loader)
    module.trainer.strategy._close()
    assert assert_goes_on_as(expected, resume(tmp_path / "run", paging)) == 7


def test_a_run_can_be_interrupted_again_and_again(tmp_path: Path) -> None:
    expected = straight(workers=2)
    interrupt(tmp_path, 3, {}, workers=2)
    for _ in range(2):
        interrupt(tmp_path, 3, {"on_existing": "resume"}, workers=2, seed=4)
    assert assert_goes_on_as(expected, resume(tmp_path, {}, workers=2)) == 9


def test_a_directory_can_be_moved(tmp_path: Path) -> None:
    expected = straight()
    interrupt(tmp_path / "a", 7, {})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert assert_goes_on_as(expected, resume(tmp_path / "b", {})) == 7


def test_several_directories_can_be_named_in_any_order(tmp_path: Path) -> None:
    expected = straight()
    names = [tmp_path / "a", tmp_path / "b"]
    interrupt(tmp_path, 7, {"offload_dir": names})
    assert assert_goes_on_as(expected, resume(tmp_path, {"offload_dir": names[::-1]})) == 7


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    train(paged(tmp_path)).trainer.strategy._close()
    assert resume(tmp_path, {}).batches == []


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    expected = straight(max_steps=22)
    train(paged(tmp_path), max_steps=17).trainer.strategy._close()
    longer = resume(tmp_path, {}, max_steps=22)
    assert longer.batches == expected.batches[17:]


def test_an_empty_directory_begins_at_the_beginning(tmp_path: Path) -> None:
    expected = straight(seed=99)
    assert assert_goes_on_as(expected, resume(tmp_path, {})) == 0


def test_another_budget_changes_nothing(tmp_path: Path) -> None:
    expected = straight()
    interrupt(tmp_path, 7, {"max_ram_gb": 0.1})
    assert assert_goes_on_as(expected, resume(tmp_path, {"max_ram_gb": 0.002})) == 7


# -- what cannot be resumed -----------------------------------------------------------------------


def test_a_committed_directory_is_not_touched_without_being_told(tmp_path: Path) -> None:
    interrupt(tmp_path, 5, {})
    with pytest.raises(ConfigError, match=r"(?s)step 5.*resume.*overwrite.*delete"):
        train(paged(tmp_path))
    resume(tmp_path, {})


CHANGES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "model": (lambda told: setattr(told, "layers", told.layers[:2]), {}, "layers.2"),
    "shape": (
        lambda told: setattr(told, "head", torch.nn.Linear(32, 100)),
        {},
        "head.bias",
    ),
    "optimizer": (lambda told: setattr(told, "optimizer", "sgd"), {}, "optimizer state"),
    "accumulation": (
        lambda told: None,
        {"accumulate_grad_batches": 2},
        "accumulate_grad_batches is 2",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_named(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(tmp_path, 5, {})
    before = {path: path.read_bytes() for path in tmp_path.glob("pages/*")}
    change, settings, words = CHANGES[what]
    original = Told.__init__

    def changed(self: Told, *arguments: Any) -> None:
        original(self, *arguments)
        change(self)

    monkeypatch.setattr(Told, "__init__", changed)
    with pytest.raises(ConfigError, match=words):
        resume(tmp_path, {}, **settings)
    assert {path: path.read_bytes() for path in tmp_path.glob("pages/*")} == before
    monkeypatch.undo()
    assert assert_goes_on_as(straight(), resume(tmp_path, {})) == 5


def test_another_form_of_state_is_refused(tmp_path: Path) -> None:
    interrupt(tmp_path, 5, {"optimizer_compression": "R1"})
    with pytest.raises(ConfigError, match="form of optimizer state R1 there and raw here"):
        resume(tmp_path, {})


def test_less_data_than_was_consumed_is_refused(tmp_path: Path) -> None:
    interrupt(tmp_path, 8, {})
    with pytest.raises(ConfigError, match="training data ended after"):
        resume(tmp_path, {}, num_samples=10)


@pytest.mark.parametrize("kind", ["page", "file", "layout"])
def test_damage_is_found_and_named(tmp_path: Path, kind: str) -> None:
    interrupt(tmp_path, 5, {})
    if kind == "page":
        for path in tmp_path.glob("pages/*"):
            data = bytearray(path.read_bytes())
            data[4096 + 100] ^= 1
            path.write_bytes(data)
    elif kind == "file":
        for path in tmp_path.glob("pages/p00002.weight.*"):
            path.unlink()
    else:
        next(tmp_path.glob("layout-*.json")).unlink()
    with pytest.raises(CorruptPageError, match=r"p\d+|layout-"):
        resume(tmp_path, {})


def test_validation_alone_cannot_resume(tmp_path: Path) -> None:
    interrupt(tmp_path, 5, {})
    trainer = Trainer(
        strategy=MegaTrainStrategy(offload_dir=tmp_path, on_existing="resume"),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    with pytest.raises(ConfigError, match=r"Trainer\.fit"):
        trainer.validate(Told(None), DataLoader(Tokens(4, False)), verbose=False)
