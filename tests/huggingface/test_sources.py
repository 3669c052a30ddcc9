"""Files of samples: which line is wrong, what they are called, how far tokenising is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import TextDataModule
from mt_lightning.huggingface.data import sources
from mt_lightning.huggingface.tokenising import tokenising
from tests.huggingface.data_cases import chat_tokenizer, shown, turns, write_lines


def set_up(path: Path, **settings: Any) -> TextDataModule:
    settings = {"tokenizer": chat_tokenizer(), "val_fraction": 0, **settings}
    data = TextDataModule(path, **settings)
    data.setup()
    return data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2 is not JSON"),
        (b'{"text": ' + b"[" * 100_000, r"a\.jsonl:1 is not JSON that can be read"),
        (
            b'{"text": "a"}\n\n{"text": "\xfc"}\n',
            r"a\.jsonl:3 is not UTF-8 text: byte 11 of the line is 0xfc .*iconv -f latin1",
        ),
        (
            '{"text": "a"}'.encode("utf-16"),
            r"a\.jsonl is not UTF-8 text: it begins as UTF-16 does.*iconv -f utf-16",
        ),
        (json.dumps([1]).encode(), "row 0 is no mapping"),
    ],
)
def test_lines_that_cannot_be_read_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        set_up(path)


def test_a_line_of_a_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"plain\n" * 20 + b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"a\.txt:21 is not UTF-8 text: byte 4"):
        set_up(path, sequence_length=8)


@pytest.mark.parametrize(("name", "kind"), [("a.csv", "csv"), ("a.parquet", "parquet")])
def test_a_table_in_a_folder_is_named(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text\nabc\n")
    with pytest.raises(ConfigError, match=rf"{name}.* data\.dataset\.path={kind} "):
        set_up(tmp_path)


def test_columns_of_tsv_are_between_tabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    path = tmp_path / "a.tsv"
    path.write_text("prompt\tcompletion\na, b\tc\n")
    with pytest.raises(ConfigError, match=r"data\.dataset\.path=csv data\.dataset\.data_files="):
        set_up(path)
    found = sources.load_dataset("csv", data_files=str(path), split="train")
    assert found[0] == {"prompt": "a, b", "completion": "c"}


def test_conversations_of_sharegpt_are_read_as_they_are(tmp_path: Path) -> None:
    contents = ("Hi", "Hello.", "So", "Yes")
    names = ("human", "gpt")
    talk = [{"from": names[i % 2], "value": text} for i, text in enumerate(contents)]
    theirs = write_lines(tmp_path / "a.jsonl", [{"conversations": talk}])
    ours = write_lines(tmp_path / "b.jsonl", [{"messages": turns(*contents)}])
    data = [set_up(theirs, columns={"messages": "conversations"}), set_up(ours)]
    first, second = (shown(each.tokenizer, each.train_dataset[0]) for each in data)
    assert first == second
    assert first.endswith("assistant\n[Yes<|im_end|>]\n")
    assert data[0].facts is not None
    assert data[0].facts.roles == {"user": 2, "assistant": 2}


@pytest.mark.parametrize("packing", [False, True])
def test_prompts_are_what_comes_before_an_answer(packing: bool, tmp_path: Path) -> None:
    talks = [{"messages": turns(f"{i}?", f"{i}!")} for i in range(8)]
    path = write_lines(tmp_path / "a.jsonl", talks)
    data = set_up(path, val_fraction=0.25, packing=packing)
    prompts = [data.tokenizer.decode(ids) for ids in data.prompts(2)]
    talk = "<|im_start|>user\n{}?<|im_end|>\n<|im_start|>assistant\n"
    assert prompts == [talk.format(i) for i in ((6,) if packing else (6, 7))]


def test_prompts_of_a_text_are_its_beginnings(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abcdefghij"}] * 2)
    data = set_up(path)
    assert [data.tokenizer.decode(ids) for ids in data.prompts(9)] == ["abcde", "abcde"]
    own = TextDataModule(tokenizer="bytes")
    assert "".join(own.tokenizer.decode(own.prompts(1)[0])).startswith("HAMLET.")


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_moves_where_a_person_watches(watched: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=watched, width=60)
    with tokenising("rows", 4, console) as advance:
        advance(3)
    written = console.file.getvalue()  # pyright: ignore
    assert ("75%" in written) == watched
