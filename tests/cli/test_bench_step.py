"""`megatrain bench step` trains the same model plainly and on pages, in turns, against a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mt_lightning.cli import main

TINY = ["--width", "64", "--layers", "2", "--vocab", "16", "--batch", "1", "--length", "8"]
ONE_TURN = ["--turns", "1", "--steps", "1"]


def test_every_budget_and_balance_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "step", *TINY, *ONE_TURN, "--budget", "fits", "smallest", "400%"]
    assert main([*command, "--balance", "0.5", "2", "--dir", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    names = [result["name"] for result in results]
    assert names[:3] == ["plain", "plain again", "fits"]
    assert [(r["name"], r["balance"]) for r in results if r["name"] == "smallest"] == [
        ("smallest", 0.5),
        ("smallest", 2.0),
    ]
    for result in results:
        assert result["seconds"] > 0
        assert result["of_bound"] * result["bound_s"] == pytest.approx(result["seconds"])
    slow, slower = (result for result in results if result["name"] == "smallest")
    assert slow["read_bytes"] > 0
    assert slow["written_bytes"] > 0
    assert slower["bound_s"] > slow["bound_s"]
    fits = results[2]
    assert (fits["read_bytes"], fits["written_bytes"], fits["budget_gib"]) == (0, 0, None)
    assert list(tmp_path.iterdir()) == []


def test_the_table_shows_them_at_the_speed_that_was_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "step", *TINY, *ONE_TURN, "--budget", "smallest", "--dir", str(tmp_path)]
    assert main([*command, "--read-mb-s", "50", "--write-mb-s", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert [line.split("  ")[0] for line in lines if " yes " in line] == ["plain again", "smallest"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--width", "100"], "--width must be a multiple of 64, not 100"),
        (["--layers", "0"], "--layers must be at least 1, not 0"),
        (["--budget", "much"], "not 'much'"),
        (["--budget", "0%"], "not '0%'"),
        (["--balance", "0"], "--balance must be above 0"),
        (["--read-mb-s", "nan"], "--read-mb-s must be above 0"),
        (["--balance", "1", "--write-mb-s", "5"], "--balance sets the speeds"),
        (["--dir", "nowhere"], "nowhere is no directory"),
        ([*TINY, "--budget", "1e-6"], "max_ram_gb"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *ONE_TURN, *wrong]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
