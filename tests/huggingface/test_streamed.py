"""Checkpoints of every kind: the same weights as the ordinary load, one tensor in RAM at a time."""

from __future__ import annotations

import errno
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, core_model_loading

import mt_lightning as mt
from mt_lightning.callbacks.memory import MemorySampler, process_memory_bytes
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.huggingface import session, streamed
from mt_lightning.huggingface.mapped_files import is_file_backed
from mt_lightning.huggingface.pretrained import save_model
from tests.huggingface.trainer_cases import arguments, llama, samples


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "benchmarks" / "loading.py"
    spec = importlib.util.spec_from_file_location("loading_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loading = _benchmark()


@pytest.fixture(autouse=True)
def session_of_its_own() -> Iterator[None]:
    yield
    session.reset()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind == "gguf" else [])
        for kind in loading.KINDS
    ],
)
@pytest.mark.filterwarnings("ignore")  # of transformers, about quantised checkpoints
def test_streamed_weights_are_those_of_the_ordinary_load(kind: str, tmp_path: Path) -> None:
    loading.KINDS[kind](tmp_path / "model", 256, 2)
    plain = loading.load(tmp_path / "model")
    expected = loading.digest_of(plain)
    large = {n for n, p in plain.named_parameters() if p.numel() * 4 >= 1 << 16}
    del plain
    mt.init(offload_dir=tmp_path / "pages")
    model = loading.load(tmp_path / "model")
    assert loading.digest_of(model) == expected
    assert large
    assert all(is_file_backed(param) for name, param in model.named_parameters() if name in large)
    assert not any(file.name.startswith(".loading") for file in (tmp_path / "pages").glob("*"))
    # Weights are the user's: to write to, to save, and to train.
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    if kind in ("fp32", "moe"):
        save_model(model, tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        for one, other in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert loading.digest_of(loading.load(tmp_path / "model")) == expected


@pytest.mark.parametrize("kind", ["bf16", "moe"])
def test_loading_takes_the_memory_of_one_tensor(kind: str, tmp_path: Path) -> None:
    loading.KINDS[kind](tmp_path / "model", 512, 8)
    mt.init(offload_dir=tmp_path / "pages")
    loading.load(tmp_path / "model")  # imports
    sampler, before = MemorySampler(interval_s=0.001), process_memory_bytes()
    sampler.start()
    model = loading.load(tmp_path / "model")
    sampler.stop()
    sizes = [param.numel() * param.element_size() for param in model.parameters()]
    taken = sampler.peak_bytes - before
    assert sum(sizes) > 60e6
    assert taken <= 1.5 * max(sizes) + 6e6, f"{taken / 1e6:.1f} MB, largest {max(sizes) / 1e6:.1f}"


def test_from_pretrained_is_the_same_without_init(tmp_path: Path) -> None:
    loading.save_bf16(tmp_path / "model", 256, 1)
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    model = mt.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert all(is_file_backed(p) for p in model.parameters() if p.numel() > 1 << 14)
    assert list((tmp_path / "here").iterdir()) == []
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert not is_file_backed(ordinary.lm_head.weight)
    assert loading.digest_of(model) == loading.digest_of(ordinary)
    with pytest.raises(ConfigError, match="Cannot load the model '/no/such'"):
        mt.from_pretrained("/no/such")


def test_a_transformers_that_is_not_known_loads_as_it_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loading.save_bf16(tmp_path, 256, 1)

    def set_param(model: Any, name: str) -> None:
        raise AssertionError

    monkeypatch.setattr(core_model_loading, "set_param_for_module", set_param)
    with pytest.warns(UserWarning, match=r"loads weights in a way .*set_param_for_module takes"):
        mt.init(offload_dir=tmp_path / "pages")
    assert core_model_loading.set_param_for_module is set_param


def test_a_full_drive_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loading.save_bf16(tmp_path / "model", 256, 1)
    mt.init(offload_dir=tmp_path / "pages")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="of a weight that is loaded.*another offload_dir"):
        loading.load(tmp_path / "model")


def test_init_again_replaces_the_settings_and_is_undone(tmp_path: Path) -> None:
    original = core_model_loading.set_param_for_module
    mt.init(offload_dir=tmp_path / "a")
    mt.init(offload_dir=tmp_path / "b", max_ram_gb=0.5)
    loading.save_bf16(tmp_path / "model", 256, 1)
    model = loading.load(tmp_path / "model")
    assert (tmp_path / "b").is_dir()
    assert not (tmp_path / "a").exists()
    trainer = mt.Trainer(llama(), arguments(tmp_path), train_dataset=samples(8))
    assert trainer.lightning_trainer.strategy.options.max_ram_gb == 0.5  # type: ignore[attr-defined]
    assert "offload_dir" in str(trainer.lightning_trainer.strategy.options)  # type: ignore[attr-defined]
    session.reset()
    assert core_model_loading.set_param_for_module is original
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed.disable()
    assert model.lm_head.weight.isfinite().all()
