"""Values of another type than their setting are refused where settings are composed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mt_lightning.commands.settings import (
    CONFIG_NAME,
    VERSION_BASE,
    group_choices,
    settings_directory,
)
from mt_lightning.commands.types import check_types, described, fits
from mt_lightning.errors import ConfigError


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3, -1], ["3", 3.0, True, None, [3]]),
        (float, [3, 0.5], ["0.5", False, None]),
        (str, ["3", "", "${x}"], [3, True, None, ["a"]]),
        (bool | None, [True, None], ["yes", 1]),
        (Literal["auto", 1], ["auto", 1], ["a", True, 2]),
        (tuple[float, float], [[1, 2], (0.1, 0.2)], ["1", 1.0, {"a": 1}]),
        (Sequence[str] | None, [["a"], None], ["a", [1]]),
        (str | Path, ["a"], [7]),
        (dict[str, Any], [{"a": 1}], ["a", [1]]),
        (Path, [{"_target_": "pathlib.Path"}], [7]),
        (Any, [7, "a", None, [1]], []),
        ("not resolved", [7, "a"], []),
    ],
)
def test_what_fits_a_type(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


def test_a_type_in_words() -> None:
    assert described(int | float | None) == "a whole number, a number or null"
    assert described(Literal["a", "b"]) == "'a' or 'b'"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=four", "data.batch_size='four': give a whole number."),
        ("++data.num_workers=1.5", "data.num_workers=1.5: give a whole number."),
        ("++data.packing=maybe", "data.packing='maybe': give true or false."),
        ("++data.loss_on=answers", "data.loss_on='answers': give 'auto', 'all', "),
        ("++model.warmup_steps=ten", "model.warmup_steps='ten': give a whole number."),
        ("trainer.max_steps=1e3", "trainer.max_steps=1000.0: give a whole number."),
        ("trainer.enable_checkpointing=no way", "trainer.enable_checkpointing='no way': give true"),
        ("strategy.max_ram_gb=lots", "strategy.max_ram_gb='lots': give a number or null."),
        ("logger.save_dir=3", "logger.save_dir=3: give a text or a Path."),
    ],
)
def test_a_wrong_type_names_the_setting(override: str, message: str) -> None:
    name, _, value = override.partition("=")
    with initialize_config_dir(str(settings_directory()), version_base=VERSION_BASE):
        quoted = f"'{value}'" if " " in value else value
        forced = f"++{name.lstrip('+')}={quoted}"
        settings = compose(CONFIG_NAME, overrides=["model=tiny", forced])
    with pytest.raises(ConfigError) as refused:
        check_types(settings)
    assert str(refused.value).startswith(message)


def test_what_is_shipped_fits() -> None:
    with initialize_config_dir(str(settings_directory()), version_base=VERSION_BASE):
        for group, choices in group_choices().items():
            for choice in choices:
                settings = compose(CONFIG_NAME, overrides=[f"{group}={choice}"])
                check_types(settings)
    check_types(OmegaConf.create({"_target_": "torch.optim.SGD", "params": "???"}))
