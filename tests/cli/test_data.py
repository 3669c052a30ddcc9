"""`megatrain data` shows what is trained, and refuses what cannot be meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mt_lightning import cli
from tests.huggingface.data_cases import CHAT, conversations, turns, write_lines

TINY = ["model=tiny", "data.sequence_length=64"]


def chat(folder: Path, rows: list[Any]) -> list[str]:
    (folder / "chat.jinja").write_text(CHAT)
    path = write_lines(folder / "talks.jsonl", rows)
    return ["data=chat", f"data.path={path}", f"data.chat_template={folder}/chat.jinja", *TINY]


def test_a_row_is_shown_with_what_is_trained(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*conversations(9), {"messages": turns("a question", "x" * 200)}]
    arguments = [*chat(workplace, rows), "data.sequence_length=128", "data.val_fraction=0.2"]
    assert cli.main(["data", *arguments[:2], "--row", "3", *arguments[2:]]) == 0
    out = capsys.readouterr().out
    assert "training rows  8, up to 128 tokens each" in out
    assert "validation     2" in out
    assert "10 of 10 rows, validation included" in out
    assert "1 samples, 143 tokens; the longest has 271" in out
    assert "0 of 10 end in '<|endoftext|>'" in out
    assert "'user' (10 messages), 'assistant' (10 messages)" in out
    assert "Training row 3: 81 tokens" in out
    assert "<|im_start|>assistant" in out
    assert "\u27e6it is xxx.<|im_end|>" in out
    assert {path.name for path in workplace.iterdir()} == {"chat.jinja", "talks.jsonl"}


def test_packed_rows_and_texts_are_shown(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(workplace / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}] * 20)
    arguments = ["data=completion", f"data.path={path}", "data.packing=true", *TINY]
    assert cli.main(["data", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("2+2=\u27e64<|endoftext|>\u27e7") == 10
    assert "20 of 20 end in '<|endoftext|>'" in out
    assert "120, of which 40 are trained (33.3%)" in out
    assert cli.main(["data", *TINY]) == 0
    assert "of a text in blocks, all trained" in capsys.readouterr().out


def test_a_data_set_of_hugging_face_is_shown(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", workplace / "datasets")
    (workplace / "rows.json").write_text(json.dumps([{"text": f"row {i}"} for i in range(8)]))
    files = ["data.dataset.path=json", f"data.dataset.data_files={workplace}/rows.json"]
    assert cli.main(["data", "data=dataset", *files, *TINY]) == 0
    assert "8 of 8 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"messages": turns("only a question")}] * 4, [], "(0 % trained tokens)"),
        ([{"message": []}], [], "Did you mean 'message' for 'messages'?"),
        (conversations(4), ["--row", "9"], "the data have 3 training rows; set --row from 0 to 2"),
        (conversations(4), ["data.loss=all"], "did you mean data.loss_on?"),
        (conversations(4), ["data.loss_on=completion"], "set it to 'auto', 'all' or 'assistant'"),
        (conversations(4), ["data.sequence_length=4"], "raise data.sequence_length"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    rows: list[Any],
    settings: list[str],
    message: str,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["data", *chat(workplace, rows), *settings]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error


def test_a_path_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "data=chat", *TINY]) == 2
    assert "need a value for data.path. " in capsys.readouterr().err


def test_conversations_train_from_the_command_line(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*chat(workplace, conversations(12)), "data.packing=true", "data.batch_size=2"]
    steps = ["trainer.max_steps=2", "samples.max_new_tokens=2", "save_model=false"]
    assert cli.main(["train", *arguments, *steps]) == 0
    out = capsys.readouterr().out
    assert "After 2 steps: perplexity" in out
    assert out.count("what is 11?<|im_end|>") == 2
    assert "HAMLET" not in out
