"""Samples: what is trained of each kind, where they come from, and how they are kept."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import TextDataModule
from mt_lightning.huggingface.data import sources
from mt_lightning.huggingface.data.encoding import Encoder
from mt_lightning.huggingface.loading import gguf_path_of_smollm2
from tests.huggingface.data_cases import (
    CHAT,
    FORGETFUL,
    MARKED,
    chat_tokenizer,
    conversations,
    marked,
    shown,
    turns,
    write_lines,
)

TALK = turns("Hi", "Hello.\nYou?", "So", "Yes")


def encoded(row: dict[str, Any], template: str | None = CHAT, **settings: Any) -> str:
    tokenizer = chat_tokenizer(template)
    sample = Encoder(tokenizer, **settings).encode(row, "row 0")
    return marked(tokenizer, sample.ids, sample.trained)


def make(dataset: Any = None, **settings: Any) -> TextDataModule:
    settings = {"tokenizer": chat_tokenizer(), "sequence_length": 64, "batch_size": 2, **settings}
    data = TextDataModule(dataset=dataset, **settings)
    data.setup()
    return data


def rows_of(data: TextDataModule) -> list[Any]:
    train: Any = data.train_dataset
    return [train[i] for i in range(len(train))]


@pytest.mark.parametrize("template", [CHAT, MARKED], ids=["plain", "marked"])
def test_only_answers_are_trained(template: str) -> None:
    assert encoded({"messages": TALK}, template) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.\nYou?<|im_end|>]\n"
        "<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n[Yes<|im_end|>]\n"
    )
    last = encoded({"prompt": TALK[:3], "completion": TALK[3:]}, template)
    assert last == encoded({"messages": TALK}, template).replace(
        "[Hello.\nYou?<|im_end|>]", "Hello.\nYou?<|im_end|>"
    )


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"text": "abc"}, {}, "[abc<|im_end|>]"),
        ({"prompt": "2+2=", "completion": "4"}, {}, "2+2=[4<|im_end|>]"),
        ({"prompt": "2+2=", "completion": "4"}, {"loss_on": "all"}, "[2+2=4<|im_end|>]"),
        ({"prompt": "2+2=", "completion": "4"}, {"max_tokens": 5}, "2+2=[4]"),
        ({"prompt": "", "completion": "ab", "id": 7}, {"kind": "completion"}, "[ab<|im_end|>]"),
    ],
)
def test_texts_and_completions(
    row: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    assert encoded(row, **settings) == expected


@pytest.mark.slow
def test_answers_are_found_by_the_template_of_smollm2() -> None:
    path = gguf_path_of_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    sample = Encoder(tokenizer).encode({"messages": TALK}, "row 0")
    text = marked(tokenizer, sample.ids, sample.trained)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("assistant\n[Yes<|im_end|>]\n")
    assert text.count("[") == 2
    assert sample.ends


def test_the_end_is_seen_and_the_cut() -> None:
    encoder = Encoder(chat_tokenizer(), max_tokens=6)
    assert encoder.encode({"text": "12345"}, "row").ends
    cut = encoder.encode({"text": "1234567"}, "row")
    assert (len(cut.ids), cut.num_tokens, cut.ends) == (6, 8, False)


def test_json_lines_are_read_in_order(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", [{"text": "third"}])
    path = write_lines(tmp_path / "a.jsonl", [{"text": "first"}, {"text": "second"}])
    path.write_text(path.read_text() + "\n")
    data = TextDataModule(tmp_path, tokenizer=chat_tokenizer(), val_fraction=0.34)
    data.setup()
    texts = [shown(data.tokenizer, row) for row in rows_of(data)]
    assert texts == ["[first<|im_end|>]", "[second<|im_end|>]"]
    (batch,) = list(data.val_dataloader())
    assert shown(data.tokenizer, {k: v[0] for k, v in batch.items()}) == "[third<|im_end|>]"


def test_batches_are_filled_up_and_labelled() -> None:
    data = make([{"prompt": "a", "completion": "b"}, {"prompt": "cde", "completion": "f"}] * 4)
    for batch in data.train_dataloader():
        assert batch["attention_mask"].shape == batch["input_ids"].shape
        empty = batch["attention_mask"] == 0
        assert bool((batch["labels"][empty] == -100).all())
        assert (batch["labels"] != -100).sum(1).tolist() == [2] * len(batch["labels"])
    assert data.facts is not None
    assert data.facts.num_samples == 8
    assert data.facts.trained_share == pytest.approx(2 * 8 / (3 * 4 + 5 * 4))


def table_of(rows: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return rows as a data set of Hugging Face, kept in the folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")
    path = write_lines(folder / "rows.jsonl", rows)
    return sources.load_dataset("json", data_files=str(path), split="train")


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_every_kind_of_data_set_gives_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = conversations(9)
    table = table_of(rows, tmp_path, monkeypatch)
    streamed = table.to_iterable_dataset()
    table.save_to_disk(str(tmp_path / "saved"))
    texts = [
        [shown(chat_tokenizer(), row) for row in source]
        for source in (
            rows_of(make(rows, val_fraction=0)),
            rows_of(make(table, val_fraction=0)),
            rows_of(make(sources.load_dataset(tmp_path / "saved"), val_fraction=0)),
            list(make(Stream(rows)).train_dataset),
            list(make(streamed).train_dataset),
        )
    ]
    assert texts[0][3] == (
        "<|im_start|>user\nwhat is 3?<|im_end|>\n<|im_start|>assistant\n[it is xxx.<|im_end|>]\n"
    )
    assert texts == [texts[0]] * 5


def test_workers_read_the_same(tmp_path: Path) -> None:
    data = make(conversations(6), num_workers=1, packing=True)
    train: Any = data.train_dataset
    copied = pickle.loads(pickle.dumps(train))
    assert torch.equal(copied[1]["labels"], train[1]["labels"])
    batches = [
        list(each.train_dataloader()) for each in (data, make(conversations(6), packing=True))
    ]
    for one, other in zip(*batches, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_stream_has_one_reader() -> None:
    loader = make(Stream(conversations(4)), num_workers=2).train_dataloader()
    with pytest.raises(ConfigError, match=r"data\.num_workers=2, and the data set has no length"):
        next(iter(loader))


def test_tokens_are_kept_until_something_changes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders() -> set[str]:
        return {path.name for path in (cache / "samples").iterdir()}

    rows = conversations(4)
    make(rows)
    first = folders()
    assert len(first) == 1
    (folder,) = (cache / "samples").iterdir()
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path.name for path in written} == {"tokens", "trained", "starts", "facts.json"}
    make(rows, batch_size=3, val_fraction=0.5, seed=4, packing=True)
    make(rows)
    assert folders() == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    other = chat_tokenizer()
    other.add_tokens(["what"])
    for dataset, settings in (
        (rows[:3], {}),
        (rows, {"sequence_length": 50}),
        (rows, {"loss_on": "all"}),
        (rows, {"chat_template": MARKED}),
        (rows, {"tokenizer": other}),
        (rows, {"overlong": "drop"}),
        (table_of(rows, tmp_path, monkeypatch), {}),
    ):
        before = folders()
        make(dataset, **settings)
        assert len(folders()) == len(before) + 1, settings


def test_columns_can_have_other_names() -> None:
    rows = [{"q": "1", "a": "2", "extra": None}] * 4
    data = make(rows, columns={"prompt": "q", "completion": "a"})
    assert shown(data.tokenizer, rows_of(data)[0]) == "1[2<|im_end|>]"


def test_columns_can_change_places() -> None:
    rows = [{"prompt": "2", "completion": "1"}] * 4
    data = make(rows, columns={"prompt": "completion", "completion": "prompt"})
    assert shown(data.tokenizer, rows_of(data)[0]) == "1[2<|im_end|>]"


def test_a_template_counts_where_conversations_follow_texts(cache: Path) -> None:
    rows = [{"text": "a"}, *conversations(3)]
    make(rows)
    make(rows, chat_template=MARKED)
    assert len(list((cache / "samples").iterdir())) == 2


def test_a_table_of_pandas_is_refused_with_the_way_out() -> None:
    class Table:
        iloc = None

        def __getitem__(self, column: str) -> None: ...

    with pytest.raises(ConfigError, match=r"table\.to_dict\('records'\)"):
        make(Table())


def test_the_mark_of_windows_is_no_part_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abc"}\n')
    data = make(None, path=tmp_path / "a.jsonl", val_fraction=0)
    assert shown(data.tokenizer, rows_of(data)[0]) == "[abc<|im_end|>]"


def test_long_samples_are_cut_dropped_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "p" * n, "completion": "c" * 4} for n in (4, 8, 30)]
    cut = make(rows, sequence_length=11, val_fraction=0)
    assert cut.facts is not None
    facts = cut.facts
    assert (facts.num_samples, facts.num_cut, facts.num_cut_tokens) == (2, 1, 2)
    assert (facts.num_untrained, facts.longest, facts.num_ending) == (1, 35, 1)
    assert "1 of 3 rows are left out: 0 are longer than 11 tokens, 1 have no trained" in caplog.text
    dropped = make(rows, sequence_length=11, val_fraction=0, overlong="drop").facts
    assert dropped is not None
    assert (dropped.num_samples, dropped.num_overlong, dropped.num_cut) == (1, 2, 0)
    with pytest.raises(ConfigError, match=r"row 1 has 13 tokens, more than data\.sequence_length="):
        make(rows, sequence_length=11, overlong="refuse")


def test_columns_that_are_not_read_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    alpaca = [{"instruction": "add", "input": "1, 2", "output": "3"}] * 4
    make(alpaca, columns={"prompt": "instruction", "completion": "output"})
    assert "made of 'prompt' and 'completion'; not read: 'input'. " in caplog.text
    caplog.clear()
    make([{**row, "tools": None} for row in conversations(4)])
    assert "not read" not in caplog.text


def test_samples_that_never_end_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    make([{"text": "0123456789"}] * 4, sequence_length=8)
    assert "no sample ends in the end-of-text token '<|im_end|>'" in caplog.text


ALWAYS = CHAT.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "data.dataset is empty: it has 0 rows"),
        (
            [{"message": []}],
            {},
            r"Did you mean 'message' for 'messages'\? .*data\.columns\.messages",
        ),
        (
            [{"question": "", "answer": ""}],
            {},
            r"data\.columns\.prompt=question data\.columns\.completion=answer",
        ),
        ([{"x": 1}], {}, r"have the columns 'x'; needed: 'messages', or 'prompt' and"),
        ([{"text": "a"}], {"kind": "messages"}, "columns 'text'; needed: 'messages'"),
        ([{"text": "a"}], {"columns": {"text": "txet"}}, "Did you mean 'text'"),
        ([{"text": "a"}], {"columns": {"body": "text"}}, r"data\.columns names 'body'"),
        ([{"text": None}], {}, "row 0: 'text' is None; it has to be text"),
        (["abc"], {}, "row 0 is no mapping from columns"),
        ({"train": [1]}, {}, r"Its splits are train: give one, as in dataset\['train'\]"),
        ("hub/name", {}, "data.dataset is a str; give a data set"),
        (conversations(2), {"tokenizer": chat_tokenizer(None)}, "has no chat template"),
        (conversations(2), {"chat_template": "no/such.jinja"}, "neither a file nor the text"),
        (
            conversations(2),
            {"chat_template": "{{ 1 // 0 }}"},
            "the chat template fails on messages",
        ),
        ([{"messages": TALK}], {"chat_template": FORGETFUL}, "writes message 1 differently"),
        ([{"messages": []}], {}, "a list of messages with role and content, not an empty list"),
        ([{"messages": "hi"}], {}, "with role and content, not a str"),
        ([{"messages": [{"from": "bing", "value": "x"}]}], {}, "message 0 is from 'bing'; known"),
        ([{"messages": [{"text": "x"}]}], {}, "message 0 has no role, but text"),
        ([{"messages": turns("a")}] * 3, {}, r"none of them can be trained on \(0 % trained"),
        (
            [{"messages": [{"role": r, "content": "x"} for r in ("human", "gpt")]}] * 3,
            {},
            r"of role 'assistant'; seen were 'human' \(3 messages\), 'gpt' \(3 messages\): rename",
        ),
        (conversations(4), {"sequence_length": 8}, "The longest row has 41 tokens: raise"),
        ([{"prompt": "", "completion": "a"}] * 4, {}, r"all 8 tokens would be trained \(100 %\)"),
        ([{"text": "a"}] * 4, {"loss_on": "assistant"}, "set it to 'auto', 'all'"),
        (conversations(4), {"loss_on": "completion"}, "'auto', 'all' or 'assistant'"),
        (conversations(4), {"loss_on": "answers"}, r"data\.loss_on='answers' is unknown"),
        (conversations(4), {"overlong": "wrap"}, r"data\.overlong='wrap' is unknown"),
        (conversations(1), {}, "holds 1 of them out: none is left to train on"),
        ([{"text": "a"}] * 4, {"packing": "no"}, r"data\.packing='no' is no switch"),
        ([{"text": b"a"}], {}, "row 0 holds what is not JSON"),
        ([{"text": "ab\ud83d"}], {}, r"row 0: character 2 is half of a pair \(\\ud83d\)"),
        ([{"messages": turns("a", "\udc00")}], {}, r"row 0: character \d+ is half of a pair"),
        ([{"prompt": None, "completion": None}], {}, "row 0: 'prompt' is None; it has to be text"),
        ([{"prompt": TALK[:1], "completion": 3}], {}, "row 0: 'completion' is a int; it has to be"),
        ([{"text": "a"}, {"body": "b"}], {}, "row 1: the data have the columns 'body'"),
    ],
)
def test_bad_data_are_refused_with_a_way_out(
    rows: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(rows, **settings)


def test_a_template_that_marks_everything_is_refused() -> None:
    everything = (
        "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(ConfigError, match=r"all \d+ tokens would be trained \(100 %\)"):
        make(conversations(4), chat_template=everything)
    assert make(conversations(4), chat_template=everything, loss_on="all").facts is not None


def test_a_stream_is_checked_too() -> None:
    for rows, message in (
        ([{"prompt": "", "completion": "a"}] * 4, "100 %"),
        ([{"messages": turns("a")}] * 70, "0 % trained"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(make(Stream(rows)).train_dataset)


def test_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text " * 100)
    with pytest.raises(ConfigError, match=r"data\.packing says something of samples"):
        TextDataModule(text, tokenizer="bytes", packing=True).setup()
    with pytest.raises(ConfigError, match=r"data\.path=.* and data\.dataset are both given"):
        TextDataModule(text, dataset=conversations(3))
    write_lines(tmp_path / "b.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match=r"has 1 text\(s\) and 1 file\(s\) of JSON lines"):
        TextDataModule(tmp_path, tokenizer="bytes").setup()


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mt-lightning\[data\]'"):
        sources.load_dataset("org/name")


def test_what_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load the data set '.*nothing'"):
        sources.load_dataset(str(tmp_path / "nothing"))


def test_nothing_to_fill_batches_up_with_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None  # pyright: ignore
    with pytest.raises(ConfigError, match="neither a pad_token nor an eos_token"):
        make([{"text": "a"}] * 4, tokenizer=tokenizer)
