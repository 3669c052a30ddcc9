"""Loading by name: memory-mapped, converted once, and clear errors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from mt_lightning.callbacks.memory import process_memory_bytes
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import load_model, load_tokenizer
from mt_lightning.huggingface.cache import cache_directory
from mt_lightning.huggingface.convert import convert_gguf
from mt_lightning.huggingface.loading import smollm2_directory


def test_a_load_is_mapped_from_the_file(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    model = tiny_llama(hidden_size=512, num_hidden_layers=8)
    weight_bytes = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    del model
    load_model(tmp_path / "model")  # imports
    before = process_memory_bytes()
    loaded = load_model(tmp_path / "model")
    assert weight_bytes > 60_000_000
    assert process_memory_bytes() - before < weight_bytes / 10
    assert next(loaded.parameters()).dtype == torch.float32


def test_dtype_by_name(tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert next(load_model(tmp_path, dtype="bfloat16").parameters()).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype='float' is not|dtype='int64' is not"):
        load_model(tmp_path, dtype="int64")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_missing_folder_is_a_sentence(load: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match="Cannot load the (model|tokenizer) '/no/such/folder'"):
        load("/no/such/folder")


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(ConfigError, match=r"gguf.*pip install 'mt-lightning\[examples\]'"):
        load_model("smollm2")


def test_cache_directory_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_LIGHTNING_CACHE", str(tmp_path / "variable"))
    assert cache_directory(tmp_path / "argument") == tmp_path / "argument"
    assert cache_directory() == tmp_path / "variable"
    monkeypatch.delenv("MT_LIGHTNING_CACHE")
    assert cache_directory() == Path("~/.cache/mt_lightning").expanduser()


def fake_python(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_conversion_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Called as: python -m <module> <gguf> <folder>
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", 'echo x > "$4/model"'))
    convert_gguf(tmp_path / "a.gguf", tmp_path / "out" / "copy")
    assert (tmp_path / "out" / "copy" / "model").read_text() == "x\n"
    convert_gguf(tmp_path / "a.gguf", tmp_path / "out" / "copy")  # lost the race: keeps the other
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["copy"]


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'echo x > "$4/model"; echo "no memory" >&2; exit 3'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", body))
    with pytest.raises(ConfigError, match="exit code 3:\nno memory\n.*MT_LIGHTNING_CACHE"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "out" / "copy")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_smollm2_is_converted_once_and_knows_english(cache: Path) -> None:
    before = process_memory_bytes()
    model = load_model("smollm2")
    tokenizer = load_tokenizer("smollm2")
    weight_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert weight_bytes == 134_515_008 * 4
    # Imports and the tokenizer; the weights are mapped and the conversion was another process.
    assert process_memory_bytes() - before < weight_bytes / 3
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    folder = smollm2_directory()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2_directory() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        top = model(**ids).logits[0, -1].topk(5).indices
    assert " Paris" in [tokenizer.decode([int(i)]) for i in top]
