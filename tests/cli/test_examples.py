"""Every example runs with --fast."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert [path.stem for path in EXAMPLES] == [
        "born_on_meta",
        "chat_data",
        "huggingface_model",
        "huggingface_trainer",
        "lora",
        "plain_lightning",
        "plain_loop",
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--fast"])
    runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    assert "What goes where" in out
    assert "steps took" in out
