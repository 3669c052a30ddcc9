"""`megatrain train` and `demo`: a small run from start to end, errors, Ctrl-C."""

from __future__ import annotations

import gc
import os
import re
import signal
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from mt_lightning import cli
from mt_lightning.errors import ConfigError

# Hydra leaves the log file of a run open when the next one begins in the same process.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*megatrain.log:ResourceWarning")

TINY = ["model=tiny", "trainer=smoke", "samples.max_new_tokens=4"]


class CtrlC(Callback):
    """Press Ctrl-C after the second step."""

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def output_of(workplace: Path) -> Path:
    (folder,) = (workplace / "outputs").glob("*/*")
    return folder


def test_precision_is_that_of_the_trainer(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *TINY, "trainer.max_steps=1", "trainer.precision=bf16-true"]) == 0
    assert "lower halves of masters" in capsys.readouterr().out


def test_train_a_text_of_ones_own(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "my.txt").write_text("all work and no play makes jack a dull boy\n" * 100)
    arguments = [
        "train",
        *TINY,
        "data.path=my.txt",
        "strategy.max_ram_gb=1",
        "optimizer.lr=0.01",
        "trainer.accumulate_grad_batches=2",
    ]
    assert cli.main(arguments) == 0
    assert Path.cwd() == workplace
    out = capsys.readouterr().out
    perplexities = re.findall(r"perplexity ([\d.]+)", out)
    assert len(perplexities) == 2
    assert float(perplexities[1]) < float(perplexities[0])
    parts = ["my.txt", "Before: ", "What goes where", "What 3 steps took", "After 3 steps: "]
    positions = [out.index(part) for part in parts]
    assert positions == sorted(positions)
    assert "limit 1.00 GiB" in out

    folder = output_of(workplace)
    assert str(folder) in out
    settings = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert settings.optimizer.lr == 0.01
    assert "mt/ram_gib" in (folder / "metrics" / "metrics.csv").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.vocab_size == len(tokenizer) == 257


def test_plain_lightning_for_comparison(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["strategy=auto", "save_model=false", "data.val_fraction=0", "samples.prompts=[]"]
    assert cli.main(["train", *TINY, *arguments]) == 0
    captured = capsys.readouterr()
    assert "What goes where" not in captured.out
    assert "PagingMonitor: the strategy is not megatrain" in captured.err
    assert "steps: no validation data" in captured.out
    assert "nan" not in captured.out
    assert not (output_of(workplace) / "model").exists()


def test_a_recipe_says_what_it_chose(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recipe=auto", "optimizer.lr=0.01", "data.batch_size=2", "save_model=false"]
    quick = ["samples.prompts=[]", "data.val_fraction=0", "trainer.max_steps=1"]
    assert cli.main(["train", *TINY, *arguments, *quick]) == 0
    out = capsys.readouterr().out
    table, rest = out.split("What goes where")
    assert "recipe=auto chose" in table
    (limit,) = re.findall(r"strategy\.max_ram_gb=([\d.]+)", table)
    assert f"limit {float(limit):.2f} GiB" in rest


def test_budgets_of_hardware_are_not_for_plain_lightning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", *TINY, "strategy=auto", "hardware=rtx4090"]) == 2
    assert "Leave hardware=... out" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_trained(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = f"+callbacks.stop._target_={__name__}.CtrlC"
    assert cli.main(["train", *TINY, stop, f"strategy.offload_dir={workplace}/pages"]) == 130
    captured = capsys.readouterr()
    assert "Stopped after 2 steps." in captured.out
    assert "What 2 steps took" in captured.out
    assert f"Pages: {workplace}/pages (kept)" in captured.out
    assert captured.err.endswith("megatrain: interrupted\n")
    assert "Traceback" not in captured.err
    assert (output_of(workplace) / "model" / "model.safetensors").exists()


def test_an_interrupted_run_goes_on(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = f"strategy.offload_dir={workplace}/pages"
    steps = "trainer.max_steps=4"
    assert cli.main(["train", *TINY, steps]) == 0
    straight = re.findall(r"After 4 steps: perplexity [\d.]+", capsys.readouterr().out)
    stop = f"+callbacks.stop._target_={__name__}.CtrlC"
    assert cli.main(["train", *TINY, steps, stop, pages, "save_model=false"]) == 130
    capsys.readouterr()
    gc.collect()  # the directory is in use until the run is gone
    assert cli.main(["train", *TINY, steps, pages]) == 2
    assert "on_existing='resume'" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["train", *TINY, steps, pages, "resume=true"]) == 0
    out = capsys.readouterr().out
    assert "Before: " not in out
    assert re.findall(r"After 4 steps: perplexity [\d.]+", out) == straight


def test_going_on_needs_to_know_where(capsys: pytest.CaptureFixture[str]) -> None:
    for strategy in ([], ["strategy=auto"]):
        assert cli.main(["train", *TINY, "resume=true", *strategy]) == 2
        assert "strategy.offload_dir" in capsys.readouterr().err


def test_demo_is_train_with_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DictConfig] = []
    monkeypatch.setattr(cli, "train", lambda settings, console: seen.append(settings))
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "save_model=true", "trainer.max_steps=2"]) == 0
    assert cli.main(["train"]) == 0
    demo, saving, plain = seen
    assert (demo.save_model, saving.save_model, plain.save_model) == (False, True, True)
    assert saving.trainer.max_steps == 2
    assert demo.model == plain.model
    assert demo.trainer.max_steps == plain.trainer.max_steps


def test_a_sweep_runs_every_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int]] = []

    def note(settings: DictConfig, console: object) -> None:
        seen.append((settings.tokenizer, settings.trainer.max_epochs))

    monkeypatch.setattr(cli, "train", note)
    assert cli.main(["train", "--multirun", "model=tiny,smollm2", "trainer.max_epochs=1,2"]) == 0
    assert seen == [("bytes", 1), ("bytes", 2), ("smollm2", 1), ("smollm2", 2)]


def test_hydra_flags_pass_through(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--cfg", "job", "model=tiny", "strategy.nonfinite=skip"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert isinstance(shown, DictConfig)
    assert shown.strategy.nonfinite == "skip"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategy.max_ram=1"], "did you mean strategy.max_ram_gb?"),
        (["strategy.max_ram_gb=-1"], "max_ram_gb=-1"),
        (["strategy.max_ram_gb=0.0001"], "The smallest that works is max_ram_gb=0.0"),
        (["foo=1"], "there is no setting 'foo'; known are "),
        (["model=nope"], "Could not find 'model/nope'"),
        (["model=hf"], "need a value for model.model."),
        (["data.batch_size=four"], "data.batch_size='four': give a whole number."),
        (["data.sequence_length=1"], "data.sequence_length=1 is too small"),
        (["data.path=nope.txt"], "data.path='nope.txt' does not exist"),
        (["optimizer.lr=-1"], "The optimizer refused its settings: Invalid learning rate: -1"),
        (["trainer.precision=64-true"], "64-true"),
        (["trainer.devices=2"], "devices"),
        (["a={"], "See https://hydra.cc"),
    ],
)
def test_bad_settings_fit_on_a_screen(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error.splitlines()) < 24
    assert error.endswith("Set MT_TRACEBACK=1 to see where it came from.\n")


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="does not exist"):
        cli.main(["train", *TINY, "data.path=nope.txt"])


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: DictConfig, console: object) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "train", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", *TINY])
    assert "HYDRA_FULL_ERROR" not in os.environ


@pytest.mark.parametrize("arguments", [[], ["bench"], ["doctor", "--nope"]])
def test_unknown_words_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_request:
        cli.main(arguments)
    assert exit_request.value.code == 2
    assert "usage: megatrain" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "train"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_request:
        cli.main([command, "--help"])
    assert exit_request.value.code == 0
    out = capsys.readouterr().out
    assert "megatrain train data.path=my.txt" in out
    assert "megatrain train data=chat data.path=talks.jsonl" in out


def test_ctrl_c_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(self: Callback, *args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(CtrlC, "on_validation_start", press, raising=False)
    assert cli.main(["train", *TINY, f"+callbacks.stop._target_={__name__}.CtrlC"]) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith("megatrain: interrupted\n")
    assert "Before" not in captured.out
