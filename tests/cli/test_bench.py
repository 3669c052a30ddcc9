"""`megatrain bench adamw` measures every form of state and says so in a table or as JSON."""

from __future__ import annotations

import json

import pytest

from mt_lightning.cli import main
from mt_lightning.optim.packed.formats import FORMATS

TORCH = ("torch fused", "torch", "one pass")


def test_every_form_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "adamw", "--params", "3e5", "--threads", "1", "--rounds", "2", "--json"]
    assert main(command) == 0
    results = json.loads(capsys.readouterr().out)
    assert {result["name"] for result in results} == {*TORCH, "lossless", *FORMATS}
    for result in results:
        assert result["params_per_s"] > 0
        assert 12 < result["bytes_per_param"] <= 28.1
        assert result["against_fused"] > 0
    (fused,) = (result for result in results if result["name"] == "torch fused")
    assert fused["against_fused"] == 1
    assert fused["bytes_per_param"] == 28


def test_the_table_names_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adamw", "--params", "1e5", "--threads", "1", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*TORCH, "lossless", *FORMATS))


@pytest.mark.parametrize("wrong", [["--params", "5"], ["--threads", "0"], ["--rounds", "0"]])
def test_a_wrong_number_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adamw", *wrong]) == 2
    assert "--params" in capsys.readouterr().err
