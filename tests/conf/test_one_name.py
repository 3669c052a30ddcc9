"""Each option of the strategy has one name: in Python, Hydra, LightningCLI and `mt.init`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

import mt_lightning as mt
from mt_lightning.commands.settings import complete_arguments
from mt_lightning.engine.options import Options
from mt_lightning.huggingface import session

from .test_conf import compose_run

OTHER: dict[str, Any] = {
    "offload_dir": ["a", "b"],
    "on_existing": "overwrite",
    "max_vram_gb": 2.0,
    "max_ram_gb": 3.0,
    "max_disk_gb": 4.0,
    "optimizer_compression": "lossless",
    "layer_major": False,
    "recompute": True,
    "durability": "step",
    "nonfinite": "skip",
    "gradient_dtype": "bf16",
    "units": ["Block"],
    "resident": ["lm_head"],
    "disk_full_timeout_s": 5.0,
    "direct_storage": "auto",
}
"""A value of each option that is not its default."""
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}


def value_of(options: Options, name: str) -> Any:
    value = getattr(options, name)
    return list(value) if isinstance(value, tuple) else value


def written(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_option_is_tried_with_another_value() -> None:
    assert OTHER.keys() == DEFAULTS.keys()
    assert all(OTHER[name] != DEFAULTS[name] for name in DEFAULTS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_python(name: str) -> None:
    assert inspect.signature(mt.MegaTrainStrategy).parameters[name].default == DEFAULTS[name]
    strategy = mt.MegaTrainStrategy(**{name: OTHER[name]})
    assert value_of(strategy.options, name) == OTHER[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_hydra(name: str) -> None:
    overrides = complete_arguments([f"strategy.{name}={written(OTHER[name])}"])
    strategy = instantiate(compose_run(*overrides).strategy, _convert_="all")
    assert value_of(strategy.options, name) == OTHER[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_lightning_cli(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    words = ["--strategy=mt_lightning.MegaTrainStrategy"]
    words += [f"--strategy.{name}={written(OTHER[name])}"]
    strategy = parser.instantiate_classes(parser.parse_args(words)).strategy
    assert value_of(strategy.options, name) == OTHER[name]


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "offload_dir"])
def test_init(name: str) -> None:
    try:
        mt.init(**{name: OTHER[name]})
        strategy = session.new_strategy(fits=True, recompute=False, resumes=False)
        assert value_of(strategy.options, name) == OTHER[name]
    finally:
        session.reset()


def test_init_takes_directories(tmp_path: Any) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    try:
        mt.init(offload_dir=folders)
        strategy = session.new_strategy(fits=True, recompute=False, resumes=False)
        assert strategy.options.directories == folders
    finally:
        session.reset()
