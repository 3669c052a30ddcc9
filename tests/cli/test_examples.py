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
        "custom_loss",
        "custom_routing",
        "huggingface_model",
        "huggingface_trainer",
        "lora",
        "modified_architecture",
        "plain_lightning",
        "plain_loop",
    ]


PROTOTYPES = ["chat_data", "custom_loss", "custom_routing", "modified_architecture"]


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_prototype_is_short(name: str) -> None:
    (path,) = (path for path in EXAMPLES if path.stem == name)
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--fast"])
    runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    assert "What goes where" in out
    assert "steps took" in out
