"""`megatrain plan`: tables, JSON, exit codes, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from mt_lightning import cli

SMALL = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 256,
}  # fmt: skip


@pytest.fixture
def config(workplace: Path) -> Path:
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(workplace / "model")
    return workplace / "model"


def test_json_has_what_the_table_shows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(config), "--machine", "h100", "--sequence-length", "32"]
    arguments += ["--accumulate", "2", "--tokens", "1e6", "--footprint"]
    assert cli.main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["fits"]
    assert not data["measured"]
    assert data["time"]["step_s"] > 0
    assert data["best"]["exact"]["tokens_per_s"] > 0
    assert data["costs"]["days"] > 0
    assert [item["name"] for item in data["footprint"]][-1] == "sum"
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for text in ("max_ram_gb", "tokens per second", "modelled from data sheets", "optimizer state"):
        assert text in shown


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("bart", {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
                  "encoder_attention_heads": 4, "decoder_attention_heads": 4}),
        ("vit", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "architectures": ["ViTForImageClassification"]}),
        ("qwen2_moe", {**SMALL, "num_experts": 4, "moe_intermediate_size": 32,
                       "shared_expert_intermediate_size": 48, "num_key_value_heads": 2}),
    ],
)  # fmt: skip
def test_configs_of_many_kinds_are_planned(
    name: str, settings: dict, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab = {} if name == "vit" else {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    folder = workplace / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": name, **settings, **vocab}))
    # On the machine with one memory the link is infinitely fast, for which JSON has no word.
    arguments = ["plan", str(folder), "--machine", "dgx-spark", "--sequence-length", "32"]
    assert cli.main([*arguments, "--no-advice", "--json"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["machine_rates"]["device"]["up_bytes_per_s"] is None
    assert data["time"]["step_s"] > 0


def test_a_played_step_says_what_each_drive_moves(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(config), "--machine", "h100", "--sequence-length", "32"]
    arguments += ["--drives", "2xgen4", "--max-ram-gb", "0.07", "--durability", "step"]
    assert cli.main([*arguments, "--no-advice", "--simulate", "--json"]) == 0
    played = json.loads(capsys.readouterr().out)["simulated"]
    assert len(played["drive_bytes"]) == 2
    assert played["written_bytes"] == sum(written for _, written in played["drive_bytes"]) > 0
    assert cli.main([*arguments, "--no-advice", "--simulate"]) == 0
    assert "drive 2" in capsys.readouterr().out


def test_what_does_not_fit_ends_with_1_and_a_way_out(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(config), "--machine", "rtx4090", "--max-ram-gb", "0.001"]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "cheapest change: set max_ram_gb=" in shown
    assert cli.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["remedy"].startswith("set max_ram_gb=")


def test_a_plot_is_written(config: Path, workplace: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["plan", str(config), "--machine", "h100", "--sequence-length", "32"]
    assert cli.main([*arguments, "--no-advice", "--plot", "curves.png"]) == 0
    assert (workplace / "curves.png").stat().st_size > 1000
    assert cli.main([*arguments, "--no-advice", "--plot", "curves.nope"]) == 2
    assert cli.main([*arguments, "--no-advice", "--plot", "nowhere/curves.png"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["100B", "--machine", "abacus"], "machine 'abacus' is not known"),
        (["100B", "--machine", "H20"], "Did you mean h200?"),
        (["100B"], "no machine profile"),
        (["nothing"], "is not known"),
        (["10OB", "--machine", "h100"], "Did you mean 100B?"),
        (["1e9", "--machine", "h100"], "Sizes end in M, B or T"),
        (["0B", "--machine", "h100"], "between 1M and 5T"),
        (["-1B", "--machine", "h100"], "model='-1B': give a size between 1M and 5T"),
        (["8x7B", "--machine", "h100"], "of models with experts"),
        (["0.01M", "--machine", "h100"], "between 1M and 5T"),
        (["9B-A1B", "--machine", "h100"], "of models with experts"),
        (["no/such/folder", "--machine", "h100"], "no Hugging Face config"),
        (["hf", "--machine", "h100"], "needs the name of a model"),
        (["8B", "--machine", "h100", "--batch-size", "-1"], "--batch-size=-1: give"),
        *(
            (["8B", "--machine", "h100", option, value], f"{option} {value}: give a number above 0")
            for option, value in (("--tflops", "0"), ("--ram-gb", "-3"), ("--link-gb-per-s", "0"))
        ),
        (["8B", "--machine", "h100", "--plot", "nowhere/curves.png"], "cannot be written"),
        ([".", "--machine", "h100"], "no file config.json in it"),
        (["/no/such/folder", "--machine", "h100"], "no such folder"),
        (["8B", "--machine", "h100", "--tflops", "nan"], "finite"),
        (["8B", "--machine", "h100", "--max-ram-gb", "-3"], "--max-ram-gb=-3.0: give"),
        (["8B", "--machine", "h100", "--compression", "zip"], "--compression='zip': choose"),
        (["8B", "--machine", "h100", "--dir", "here"], "--dir goes with"),
        (["8B", "--machine", "h100", "--time-units"], "--time-units runs units on this machine"),
        (["8B", "--machine", "custom"], "needs numbers"),
        (["8B", "--machine", "h100", "--units", "Nope"], "no module of class Nope"),
        *(
            (["8B", "--machine", "h100", option, value], f"{option}={float(value)}: give a number")
            for option, value in (
                ("--tokens", "-1"),
                ("--tokens", "1e30"),
                ("--price-per-hour", "-3"),
                ("--price-per-kwh", "1e300"),
            )
        ),
        (["8B", "--machine", "h100", "--checkpoints", "-1"], "--checkpoints=-1: give"),
        (["8B", "--machine", "h100", "--layer-major", "true"], "set --accumulate above 1"),
        (["8B", "--machine", "h100", "--recompute", "maybe"], "--recompute='maybe': choose"),
        (["8B", "--machine", "h100", "--sequence-length", "9" * 13], "at most 1e+12"),
        (["8B", "--machine", "h100", "--max-ram-gb", "1e300"], "up to 1e+09"),
        (["8B", "--machine", "h100", "--disk-tb", "1e300"], "no machine has that"),
        (["8B", "--machine", "h100", "--tflops", "1e300"], "no machine has that"),
        (["8B", "--machine", "h100", "--plot", "curves.nope"], "'nope' is no format"),
        (
            ["8B", "--machine", "h100", "--optimizer", "sgd", "--compression", "true"],
            "packs the state",
        ),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments == ["nothing"]:
        arguments = [*arguments, "--machine", "h100"]
    assert cli.main(["plan", *arguments, "--json"]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out  # a program that reads JSON is not given half of it


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 0}, "no layers"),
        ({"hidden_size": -64}, "no model can be built"),
        ({"num_attention_heads": 0}, "no Hugging Face config"),
        ({"model_type": "cat"}, "no Hugging Face config"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"hidden_size": float("inf")}, "expected int, got float"),
        ({"num_hidden_layers": 100_000}, "has 100,000 layers"),
        ({"architectures": ["NoSuchModel"]}, "does not have"),
    ],
)
def test_configs_that_make_no_model(
    config: Path, changes: dict, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert cli.main(["plan", str(config), "--machine", "h100"]) == 2
    assert said in capsys.readouterr().err
    path.write_text("{not json")
    assert cli.main(["plan", str(config), "--machine", "h100"]) == 2
