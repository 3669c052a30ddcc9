"""`save_pretrained`: what transformers reads back is the model, bit for bit, at any time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors import safe_open
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from mt_lightning import ConfigError, MegaTrainStrategy
from mt_lightning.huggingface import CausalLMModule
from mt_lightning.huggingface.pretrained import save_model

SMALL = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama(**settings: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL, **settings))


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1
    )
    config.eos_token_id = 2
    return GPT2LMHeadModel(config)


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=257, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
}


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return {**MODELS, "t5": t5}[name]()


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder by safetensors' own reader; each must be there once."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert not found.keys() & tensors.keys()
            found.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    return found


def copy_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(now: dict[str, torch.Tensor], then: dict[str, torch.Tensor]) -> None:
    assert now.keys() == then.keys()
    for name, value in then.items():
        assert torch.equal(now[name], value), name


def data() -> DataLoader:
    ids = torch.randint(257, (12, 12), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": row} for row in ids], batch_size=2)  # pyright: ignore


def paged_trainer(tmp_path: Path, *callbacks: Callback) -> Trainer:
    return Trainer(
        strategy=MegaTrainStrategy(offload_dir=str(tmp_path / "run"), max_ram_gb=1),
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("name", [*MODELS, "t5"])
def test_the_files_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="90KB")
    save_model(model, tmp_path / "ours", max_shard_size="90KB")
    assert_same(read(tmp_path / "ours"), read(tmp_path / "theirs"))
    for file in ("config.json", "generation_config.json"):
        ours, theirs = (tmp_path / folder / file for folder in ("ours", "theirs"))
        assert ours.read_text() == theirs.read_text()


class SaveInFit(Callback):
    """Saves after the second step, by the module and by the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected: dict[str, torch.Tensor] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        if trainer.global_step == 2:
            assert isinstance(pl_module, CausalLMModule)
            pl_module.save_pretrained(self.folder / "module", max_shard_size="60KB")
            pl_module.model.save_pretrained(self.folder / "model")  # pyright: ignore
            self.expected = copy_of(pl_module.model)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_paged_model_is_saved_in_and_after_a_fit(name: str, tmp_path: Path) -> None:
    module = CausalLMModule(make(name))
    save = SaveInFit(tmp_path / "mid")
    trainer = paged_trainer(tmp_path, save)
    trainer.fit(module, data(), data())
    places = [(tmp_path / "mid", save.expected), (tmp_path / "fit", copy_of(module.model))]
    module.save_pretrained(tmp_path / "fit" / "module")
    module.model.save_pretrained(tmp_path / "fit" / "model")  # pyright: ignore
    trainer.validate(module, data(), verbose=False)
    module.save_pretrained(tmp_path / "validate" / "module")
    module.model.save_pretrained(tmp_path / "validate" / "model")  # pyright: ignore
    places.append((tmp_path / "validate", places[1][1]))
    for folder, expected in places:
        # Tied tensors too: transformers saves them once, whatever the phase.
        assert_same(read(folder / "module"), read(folder / "model"))
        loaded = AutoModelForCausalLM.from_pretrained(folder / "module")
        assert_same(loaded.state_dict(), expected)


def test_a_state_dict_that_user_code_changed_is_not_what_is_saved(tmp_path: Path) -> None:
    module = CausalLMModule(make("gpt2"))

    class Spoil(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
        ) -> None:
            # What lies outside every unit stays in memory, and is the parameter itself.
            held = {k: v for k, v in pl_module.state_dict().items() if ".h." in k or "wte" in k}
            before = {name: value.clone() for name, value in held.items()}
            for value in held.values():
                value.mul_(2)
            now = pl_module.state_dict()
            assert_same({name: now[name] for name in before}, before)

    paged_trainer(tmp_path, Spoil()).fit(module, data(), data())


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    model = make("llama")
    save_model(model, tmp_path, max_shard_size="30KB")
    (tmp_path / "notes.txt").write_text("mine")
    assert (tmp_path / "model.safetensors.index.json").exists()
    save_model(model, tmp_path)
    names = {"model.safetensors", "config.json", "generation_config.json", "notes.txt"}
    assert {file.name for file in tmp_path.iterdir()} == names
    save_model(model, tmp_path, max_shard_size="30KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), copy_of(model))


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    module = CausalLMModule(make("llama"))
    with pytest.raises(ConfigError, match="only safetensors"):
        module.save_pretrained(tmp_path / "a", safe_serialization=False)
    for size in ("5 apples", 0, -1, True, "0GB", "IB"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            module.save_pretrained(tmp_path / "a", max_shard_size=size)
    with pytest.raises(ConfigError, match="no model of transformers"):
        CausalLMModule(torch.nn.Linear(2, 2)).save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        module.save_pretrained(tmp_path / "file")
