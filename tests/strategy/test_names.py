"""The ways in which the strategy is asked for: by name, as an object, by LightningCLI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

import mt_lightning as mt
from tests.faults.nets import Net, after, assert_usable, fit, loader, make_trainer


def test_by_name(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "megatrain")
    assert isinstance(trainer.strategy, mt.MegaTrainStrategy)
    assert isinstance(trainer.precision_plugin, mt.MegaTrainPrecision)


def test_accelerator_auto(tmp_path: Path) -> None:
    module = Net()
    fit(module, tmp_path, "megatrain", accelerator="auto")
    assert_usable(module, after(4, tmp_path))


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI warns about pytest's
    # Lightning 2.6.6 uses names that jsonargparse is about to drop.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def run_cli(root: Path, *args: str) -> Net:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": 4,
        "default_root_dir": str(root),
    }
    cli = LightningCLI(
        Net,
        Data,
        args=["fit", "--trainer.accelerator=cpu", *args],
        trainer_defaults=quiet,
        seed_everything_default=0,
        save_config_callback=None,
    )
    assert isinstance(cli.trainer.strategy, mt.MegaTrainStrategy)
    return cli.model


@pytest.mark.parametrize(
    "strategy",
    ["megatrain", "mt_lightning.MegaTrainStrategy", "mt_lightning.strategy.MegaTrainStrategy"],
)
def test_cli(tmp_path: Path, strategy: str) -> None:
    module = run_cli(tmp_path, f"--trainer.strategy={strategy}")
    assert_usable(module, after(4, tmp_path))


def test_cli_with_options(tmp_path: Path) -> None:
    module = run_cli(
        tmp_path,
        "--trainer.strategy=mt_lightning.MegaTrainStrategy",
        f"--trainer.strategy.offload_dir={tmp_path / 'pages'}",
        "--trainer.strategy.max_ram_gb=0.5",
        "--trainer.strategy.units=Block",
        "--trainer.strategy.nonfinite=skip",
    )
    assert (tmp_path / "pages" / "commit.0").exists()
    assert_usable(module, after(4, tmp_path))


def test_cli_with_a_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n"
        "  strategy:\n"
        "    class_path: mt_lightning.MegaTrainStrategy\n"
        "    init_args:\n"
        f"      offload_dir: [{tmp_path}/a, {tmp_path}/b]\n"
        "      units: [Block]\n"
    )
    module = run_cli(tmp_path, f"--config={config}")
    assert (tmp_path / "b" / "pages").is_dir()
    assert_usable(module, after(4, tmp_path))


@pytest.mark.parametrize(
    "option", ["nonfinite=ignore", "max_ram_gb=lots", "max_ram_gb=-1", "max_ram=1"]
)
def test_cli_with_a_wrong_option(tmp_path: Path, option: str, capsys: Any) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        run_cli(
            tmp_path,
            "--trainer.strategy=mt_lightning.MegaTrainStrategy",
            f"--trainer.strategy.{option}",
        )
    name = option.split("=")[0]
    assert name in capsys.readouterr().err + str(caught.value)
