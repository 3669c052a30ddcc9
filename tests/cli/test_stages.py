"""`megatrain fit`, `validate`, `test` and `predict`: any module, from a file or from flags."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning import cli
from mt_lightning.engine.options import Options

STRATEGY = "mt_lightning.MegaTrainStrategy"
QUIET = {
    "accelerator": "cpu",
    "max_steps": 3,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
seen: list[tuple[str, Any]] = []


class Net(LightningModule):
    """A few layers, and what they were told."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self(batch).pow(2).mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self(batch).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def teardown(self, stage: str) -> None:
        seen.append((stage, self.trainer.strategy))


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 4), batch_size=2)  # pyright: ignore[reportArgumentType]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture
def config(workplace: Path) -> Path:
    path = workplace / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "seed_everything": 7,
                "trainer": QUIET,
                "model": {"class_path": f"{__name__}.Net", "init_args": {"width": 4}},
                "data": f"{__name__}.Data",
            }
        )
    )
    seen.clear()
    return path


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_each_stage_runs_on_pages(config: Path, stage: str) -> None:
    assert cli.main([stage, "-c", str(config), "--trainer.strategy.max_ram_gb=0.5"]) == 0
    ((ran, strategy),) = seen
    assert ran == stage
    assert isinstance(strategy, mt.MegaTrainStrategy)
    assert strategy.options.max_ram_gb == 0.5


@pytest.mark.parametrize(
    "chosen", [["--trainer.strategy=megatrain"], ["--trainer.strategy", "megatrain"]]
)
def test_the_short_name_of_the_strategy_takes_its_options(config: Path, chosen: list[str]) -> None:
    arguments = ["fit", "-c", str(config), *chosen, "--trainer.strategy.max_ram_gb=0.5"]
    assert cli.main(arguments) == 0
    assert seen[0][1].options.max_ram_gb == 0.5


def test_another_strategy_can_be_chosen(config: Path) -> None:
    assert cli.main(["fit", "-c", str(config), "--trainer.strategy=auto"]) == 0
    assert not isinstance(seen[0][1], mt.MegaTrainStrategy)


def test_what_is_printed_is_a_file_for_the_next_run(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--trainer.strategy.units=Linear", "--trainer.precision=bf16-mixed"]
    with pytest.raises(SystemExit) as exit_request:
        cli.main(["fit", "-c", str(config), *flags, "--print_config"])
    assert exit_request.value.code == 0
    printed = capsys.readouterr().out
    shown = yaml.safe_load(printed)["trainer"]["strategy"]
    assert shown["class_path"] == STRATEGY
    assert {field.name for field in dataclasses.fields(Options)} <= set(shown["init_args"])
    config.write_text(printed)
    assert cli.main(["fit", "-c", str(config)]) == 0
    strategy = seen[0][1]
    assert strategy.options == Options(units="Linear")
    assert strategy.precision_plugin.precision == "bf16-mixed"


def test_help_has_a_sentence_for_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["fit", "--trainer.strategy.help", STRATEGY])
    shown = " ".join(capsys.readouterr().out.partition("Help for ")[2].split())
    for field in dataclasses.fields(Options):
        found = re.search(rf"--trainer\.strategy\.{field.name} (?:\S+ )?(.*?) \(type:", shown)
        assert found, field.name
        assert len(found.group(1).split()) > 5, field.name
        unit = {"gb": "GiB", "s": "seconds"}.get(field.name.rpartition("_")[2])
        assert unit is None or unit in found.group(1).lower() or unit in found.group(1)
    with pytest.raises(SystemExit):
        cli.main(["fit", "--help"])
    assert f"--trainer.strategy.help {STRATEGY}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.strategy.max_ram=1"], "max_ram"),
        (["--trainer.strategy.nonfinite=ignore"], "nonfinite"),
        (["--trainer.maxsteps=3"], "maxsteps"),
        (["--model=Nope"], "Nope"),
    ],
)
def test_bad_flags_end_with_their_name(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_request:
        cli.main(["fit", "-c", str(config), *arguments])
    assert exit_request.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("budget", "message"),
    [("1e-6", "The smallest that works is max_ram_gb="), ("-1", "error: max_ram_gb=-1.0: give a ")],
)
def test_errors_of_the_run_fit_on_a_screen(
    config: Path, budget: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", "-c", str(config), f"--trainer.strategy.max_ram_gb={budget}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_words_of_train_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "model=tiny", "trainer.max_steps=3"]) == 2
    assert "those of `megatrain train`" in capsys.readouterr().err


def test_a_language_model_from_a_file(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Classes of the package are known by their names alone."""
    path = workplace / "run.yaml"
    model = {
        "class_path": "transformers.LlamaForCausalLM",
        "init_args": {
            "config": {
                "class_path": "transformers.LlamaConfig",
                "init_args": {
                    "vocab_size": 257,
                    "hidden_size": 16,
                    "intermediate_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                },
            }
        },
    }
    monitor = {"class_path": "PagingMonitor"}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    module = {"model": model, "optimizer": optimizer}
    settings = {
        "trainer": {**QUIET, "limit_val_batches": 1, "callbacks": [monitor]},
        "model": {"class_path": "CausalLMModule", "init_args": module},
        "data": {
            "class_path": "TextDataModule",
            "init_args": {"tokenizer": "bytes", "sequence_length": 16},
        },
    }
    path.write_text(yaml.safe_dump(settings))
    assert cli.main(["fit", f"--config={path}"]) == 0
    assert "What 3 steps took" in capsys.readouterr().out
    assert (workplace / "config.yaml").exists()  # without a logger, what ran is kept here
    assert cli.main(["fit", f"--config={path}", "--trainer.max_steps=1"]) == 0
    assert yaml.safe_load((workplace / "config.yaml").read_text())["trainer"]["max_steps"] == 1
