"""Blocks of a text: complete, in order, split, shuffled by seed and epoch, and clear errors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import TextDataModule
from mt_lightning.huggingface.byte_tokenizer import NUM_BYTE_TOKENS, byte_tokenizer
from mt_lightning.huggingface.data.blocks import EpochShuffle, TokenBlocks
from mt_lightning.huggingface.text_data import SHAKESPEARE_PATH
from mt_lightning.huggingface.token_file import open_token_file, write_token_file

LINES = "".join(f"line {i} of a text, with umlauts ä ö ü and € signs.\n" for i in range(200))
END_OF_TEXT = 256


def make_data(path: Path | None, **settings: object) -> TextDataModule:
    settings = {"tokenizer": "bytes", "sequence_length": 16, "batch_size": 2, **settings}
    return TextDataModule(path, **settings)  # pyright: ignore[reportArgumentType]


def write_text(path: Path, text: str = LINES) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def tokens_of(loader: object) -> list[int]:
    return [
        token
        for batch in loader  # pyright: ignore[reportGeneralTypeIssues]
        for row in batch["input_ids"].tolist()
        for token in row
    ]


def test_byte_tokenizer_keeps_every_byte() -> None:
    tokenizer = byte_tokenizer()
    text = LINES + "\t\0 \x7f \U0001f600"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == NUM_BYTE_TOKENS
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_blocks_are_the_text(tmp_path: Path) -> None:
    data = make_data(write_text(tmp_path / "a.txt"), val_fraction=0)
    data.setup()
    loader = data.train_dataloader()
    blocks = loader.dataset
    assert isinstance(blocks, TokenBlocks)
    tokens = [token for i in range(len(blocks)) for token in blocks[i]["input_ids"].tolist()]
    expected = [*data.tokenizer(LINES)["input_ids"], END_OF_TEXT]
    assert tokens == expected[: len(expected) // 16 * 16]
    assert blocks[0]["input_ids"].dtype == torch.int64
    assert sorted(tokens_of(loader)) == sorted(tokens)
    assert data.val_dataloader() == []


def test_the_last_blocks_validate(tmp_path: Path) -> None:
    data = make_data(write_text(tmp_path / "a.txt"), val_fraction=0.25)
    data.setup()
    ids = data.tokenizer(LINES)["input_ids"]
    num_blocks = (len(ids) + 1) // 16
    num_val_blocks = round(num_blocks / 4)
    val = tokens_of(data.val_dataloader())
    start = 16 * (num_blocks - num_val_blocks)
    assert val == [*ids, END_OF_TEXT][start : 16 * num_blocks]
    assert len(data.train_dataloader().dataset) == num_blocks - num_val_blocks  # pyright: ignore[reportArgumentType]


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    write_text(tmp_path / "b.txt", "second" * 20)
    write_text(tmp_path / "a.txt", "first." * 20)
    write_text(tmp_path / "c.md", "never" * 20)
    data = make_data(tmp_path, val_fraction=0, sequence_length=242)
    data.setup()
    tokens = tokens_of(data.train_dataloader())
    texts = data.tokenizer.decode(tokens).split("<|endoftext|>")
    assert texts == ["first." * 20, "second" * 20, ""]


def test_pieces_do_not_change_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_text(tmp_path / "a.txt")
    tokenizer = byte_tokenizer()
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    write_token_file([file], tokenizer, whole)
    monkeypatch.setattr("mt_lightning.huggingface.token_file._CHUNK_CHARACTERS", 7)
    write_token_file([file], tokenizer, pieces)
    assert pieces.read_bytes() == whole.read_bytes()


def test_text_is_tokenised_once(tmp_path: Path, cache: Path) -> None:
    path = write_text(tmp_path / "a.txt")
    for _ in range(2):
        make_data(path).setup()
    (token_file,) = (cache / "tokens").iterdir()
    before = token_file.stat().st_mtime_ns
    make_data(path).setup()
    assert token_file.stat().st_mtime_ns == before
    write_text(path, LINES * 2)
    make_data(path).setup()
    assert len(list((cache / "tokens").iterdir())) == 2


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochShuffle(20, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    torch.manual_seed(1)
    first = order(0, 0)
    state = torch.get_rng_state()
    assert order(0, 0) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(first) == list(range(20))
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_blocks_travel_to_workers_as_a_path(tmp_path: Path) -> None:
    data = make_data(write_text(tmp_path / "a.txt"), num_workers=1)
    data.setup()
    blocks = data.train_dataloader().dataset
    copied = pickle.dumps(blocks)
    assert len(copied) < 1000
    assert torch.equal(pickle.loads(copied)[3]["input_ids"], blocks[3]["input_ids"])
    in_process = make_data(data.path)
    in_process.setup()
    assert tokens_of(data.val_dataloader()) == tokens_of(in_process.val_dataloader())


def test_shakespeare_comes_with_the_package() -> None:
    data = make_data(None, sequence_length=256)
    data.setup()
    assert SHAKESPEARE_PATH.stat().st_size > 1_000_000
    assert len(data.train_dataloader().dataset) > 3000  # pyright: ignore[reportArgumentType]


def test_an_empty_token_file_is_an_empty_array(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    import numpy as np

    assert len(open_token_file(path, np.dtype(np.uint16))) == 0


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (None, {}, r"data\.path='.*' does not exist"),
        ("", {}, r"data\.path='.*' is empty"),
        ("short", {}, r"6 tokens, but 2 block.* of 16 .* set data\.sequence_length=3 or less"),
        ("0123456789abcdef", {"sequence_length": 17}, r"set data\.sequence_length=8"),
        (LINES, {"sequence_length": 1}, r"data\.sequence_length=1 is too small"),
        (LINES, {"batch_size": 0}, r"data\.batch_size=0 is too small"),
        (LINES, {"num_workers": -1}, r"data\.num_workers=-1 is too small"),
        (LINES, {"val_fraction": 1.0}, r"data\.val_fraction=1\.0 is not a share"),
        (LINES, {"tokenizer": "/no/such/tokenizer"}, r"Cannot load the tokenizer '/no/such"),
    ],
)
def test_errors_name_the_setting(
    tmp_path: Path, content: str | None, settings: dict[str, object], message: str
) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        write_text(path, content)
    with pytest.raises(ConfigError, match=message):
        make_data(path, **settings).setup()


def test_a_short_text_trains_without_validation(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.txt", "0123456789abcdef")
    data = make_data(path, val_fraction=0)
    data.setup()
    assert len(tokens_of(data.train_dataloader())) == 16


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \.txt and no \.jsonl file"):
        make_data(tmp_path).setup()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 text"):
        make_data(path).setup()
    assert list((cache / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("talks.json", r"rename it to talks\.jsonl; else .* data\.dataset\.path=json "),
        (
            "rows.csv",
            r"is no text, .* data\.dataset\.path=csv data\.dataset\.data_files=.*rows\.csv",
        ),
        ("rows.PARQUET", r"data\.dataset\.path=parquet "),
        ("talks.jsonl.gz", r"is a packed file\. Unpack it"),
    ],
)
def test_tables_and_packed_files_are_not_trained_as_texts(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_data(write_text(tmp_path / name, LINES)).setup()
