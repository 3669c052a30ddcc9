"""Adapters of PEFT on pages: the bits of plain training, frozen weights stay, small saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import mt_lightning as mt
from mt_lightning.errors import StepError
from mt_lightning.huggingface import session
from tests.huggingface.trainer_cases import arguments, losses, samples
from tests.huggingface.trainer_cases import llama as small_llama
from tests.parity import zoo

BUDGET_GB = 0.004
ATTENTION = ["q_proj", "v_proj"]
TARGETS = {
    "llama": ATTENTION,
    "gpt2": ["c_attn"],
    "qwen3_moe": ATTENTION,
    "mixtral": ATTENTION,
    "t5": ["q", "v"],
    "bert": ["query", "value"],
    "vit": ATTENTION,
}


@pytest.fixture(autouse=True)
def session_of_its_own() -> Iterator[None]:
    yield
    session.reset()


def lora(**settings: Any) -> peft.PeftConfig:
    return peft.LoraConfig(
        **{
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ATTENTION,
            "init_lora_weights": False,
            **settings,
        }
    )


KINDS: dict[str, peft.PeftConfig] = {
    "dora": lora(use_dora=True),
    "head": lora(modules_to_save=["lm_head"]),
    "loha": peft.LoHaConfig(r=4, target_modules=ATTENTION),
    "ia3": peft.IA3Config(target_modules=ATTENTION, feedforward_modules=[]),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "adalora": peft.AdaLoraConfig(
        target_modules=ATTENTION, init_r=4, tinit=0, tfinal=1, total_step=9, task_type="CAUSAL_LM"
    ),
    "tokens": lora(trainable_token_indices=list(range(40))),
}
RESIDENT = {"adalora": ["lora_A", "lora_B"], "tokens": "embed_tokens"}
"""What code reads beside its module: a penalty over adapters, or the embedding."""


def adapted(name: str = "llama", config: peft.PeftConfig | None = None) -> Any:
    base: Any = zoo.build(name, dropout=0.0, tied=False)
    torch.manual_seed(1)
    if config is None:
        settings = {"target_modules": TARGETS[name], "fan_in_fan_out": name == "gpt2"}
        config = lora(**settings, lora_dropout=0.1)
    return peft.get_peft_model(base, config)


class Module(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(model: Any, name: str, strategy: Any, folder: Path) -> Any:
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=3,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(2)
    trainer.fit(Module(model), DataLoader(zoo.batches(name, 3, 3), batch_size=None))  # pyright: ignore
    return trainer


def pages(folder: Path, **settings: Any) -> mt.MegaTrainStrategy:
    return mt.MegaTrainStrategy(offload_dir=folder / "pages", max_ram_gb=BUDGET_GB, **settings)


def assert_same(plain: Any, paged: Any) -> None:
    for (name, p), q in zip(plain.named_parameters(), paged.parameters(), strict=True):
        assert torch.equal(p, q), name


CASES = [(name, None) for name in TARGETS] + [("llama", kind) for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), CASES, ids=[kind or name for name, kind in CASES])
def test_pages_train_adapters_to_the_same_bits(name: str, kind: str | None, tmp_path: Path) -> None:
    config = KINDS[kind] if kind else None
    plain, paged, start = (adapted(name, config) for _ in range(3))
    fit(plain, name, "auto", tmp_path)
    trainer = fit(paged, name, pages(tmp_path, resident=RESIDENT.get(kind or "")), tmp_path)
    assert_same(plain, paged)
    for (key, p), q in zip(paged.named_parameters(), start.named_parameters(), strict=True):
        assert p.requires_grad != torch.equal(p, q[1]), key
    assert trainer.strategy.engine.stats.ram_peak_bytes <= BUDGET_GB * 2**30


def test_frozen_pages_are_never_written(tmp_path: Path) -> None:
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    settings = {"max_ram_gb": 0.0008, "durability": "step"}
    with mt.page(model, optimizer, offload_dir=tmp_path / "pages", **settings) as paged:
        started = paged.stats.bytes_written
        assert started > frozen_bytes
        before = written(tmp_path / "pages")
        for batch in zoo.batches("llama", 4, 1):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        paged.commit()
        stats = paged.stats
        changed = {
            name for name, at in written(tmp_path / "pages").items() if before.get(name) != at
        }
        table = paged._engine.live.run.build.table
        frozen = [page for page in table if page.layout.optimizer is None]
        assert sum(page.layout.used_bytes for page in frozen) >= frozen_bytes
        assert not {page.weight.file for page in frozen} & changed
        assert {page.weight.file for page in table if page.layout.optimizer == 0} <= changed
        assert stats.bytes_written - started < frozen_bytes
        assert stats.bytes_read > frozen_bytes  # the frozen ones came and went all the same


def written(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_only_adapters_are_saved(tmp_path: Path) -> None:
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = zoo.batches("llama", 1, 1)[0]
    with mt.page(model, optimizer, offload_dir=tmp_path / "pages", max_ram_gb=BUDGET_GB) as paged:
        model(**batch).loss.backward()
        optimizer.step()
        paged.save_pretrained(tmp_path / "live")
    mt.CausalLMModule(model).save_pretrained(tmp_path / "after")
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    expected = model.eval()(**batch).logits
    for folder in ("live", "after"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= names
        assert "model.safetensors" not in names
        assert size <= (tmp_path / folder / "adapter_model.safetensors").stat().st_size < 2 * size
        base: Any = zoo.build("llama", dropout=0.0, tied=False)
        again = peft.PeftModel.from_pretrained(base, str(tmp_path / folder)).eval()
        assert torch.equal(again(**batch).logits, expected)


def test_merging_is_refused_on_pages_and_exact_afterwards(tmp_path: Path) -> None:
    plain, model = adapted(), adapted()
    fit(plain, "llama", "auto", tmp_path)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with mt.page(model, optimizer, offload_dir=tmp_path / "one", max_ram_gb=BUDGET_GB):
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(StepError, match=r"merge\(\) of .*q_proj while its weights are in"):
                merge()
        with model.disable_adapter(), torch.no_grad():
            off = model(**zoo.batches("llama", 1, 1)[0]).logits
    base: Any = zoo.build("llama", dropout=0.0, tied=False)
    assert torch.equal(off, base(**zoo.batches("llama", 1, 1)[0]).logits)
    fit(model, "llama", pages(tmp_path), tmp_path)
    assert_same(plain.merge_and_unload(), model.merge_and_unload())


def two_adapters() -> Any:
    model = adapted()
    torch.manual_seed(2)
    model.add_adapter("second", lora())
    return model


ADDITIONS: dict[str, Any] = {
    kind: lambda model, kind=kind: model.add_weighted_adapter(
        ["default", "second"], [0.5, 0.25], "new", combination_type=kind
    )
    for kind in ("linear", "cat", "svd")
} | {
    name: lambda model, config=config: model.add_adapter("new", config)
    for name, config in {
        "dora": lora(use_dora=True),
        "tokens": lora(trainable_token_indices={"embed_tokens": [1, 2]}),
        "pissa": lora(init_lora_weights="pissa"),
        "olora": lora(init_lora_weights="olora"),
    }.items()
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_adapters_made_of_weights_are_refused_on_pages_and_exact_afterwards(
    name: str, tmp_path: Path
) -> None:
    plain, model = two_adapters(), two_adapters()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with (
        mt.page(model, optimizer, offload_dir=tmp_path / "pages", max_ram_gb=0.0008),
        pytest.raises(StepError, match=r"adapter\(\) of .* while its weights are in pages"),
    ):
        ADDITIONS[name](model)
    for one in (plain, model):
        torch.manual_seed(3)
        ADDITIONS[name](one)
    assert any(".new." in key or key.endswith(".new") for key, _ in model.named_parameters())
    assert_same(plain, model)


def test_a_paged_model_is_not_adapted_until_it_shows_its_weights(tmp_path: Path) -> None:
    def make() -> Any:
        return zoo.build("llama", dropout=0.0, tied=False)

    def adapt(model: Any, config: peft.PeftConfig) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)

    plain, model = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    dora = lora(use_dora=True)
    with mt.page(model, optimizer, offload_dir=tmp_path / "pages", max_ram_gb=BUDGET_GB):
        tokens = peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[1])
        for config in (dora, lora(init_lora_weights="pissa"), KINDS["ia3"], tokens):
            with pytest.raises(StepError, match=r"an adapter \(\w+\) put around model\..* while"):
                adapt(model, config)
        with pytest.raises(StepError, match=r"add_adapter\(\) of LlamaForCausalLM while"):
            model.add_adapter(dora)
        assert not any(isinstance(one, peft.tuners.lora.LoraLayer) for one in model.modules())
    assert_same(adapt(plain, dora), adapt(model, dora))


@pytest.mark.filterwarnings("ignore")  # transformers' and accelerate's own
def test_the_trainer_trains_saves_and_goes_on_with_adapters(tmp_path: Path) -> None:
    def make() -> Any:
        base: Any = small_llama()
        torch.manual_seed(1)
        return peft.get_peft_model(base, lora(task_type="CAUSAL_LM"))

    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    theirs = transformers.Trainer(
        make(),
        arguments(tmp_path / "theirs", **settings),
        train_dataset=samples(32),  # pyright: ignore
    )
    theirs.train()
    mt.init(max_ram_gb=BUDGET_GB)
    ours = mt.Trainer(make(), arguments(tmp_path / "ours", **settings), train_dataset=samples(32))
    ours.train()
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    folder = tmp_path / "ours" / "checkpoint-2"
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    again = mt.Trainer(make(), arguments(tmp_path / "ours", **settings), train_dataset=samples(32))
    again.train(resume_from_checkpoint=folder)
    assert_same(ours.model, again.model)
    ours.save_model(tmp_path / "saved")
    assert "adapter_model.safetensors" in {path.name for path in (tmp_path / "saved").iterdir()}


def llava(num_layers: int) -> Any:
    """Give a model that can look at pictures, with a tower of so many layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            **sizes, num_hidden_layers=num_layers, image_size=8, patch_size=4, projection_dim=64
        ),
        text_config=LlamaConfig(
            **sizes, vocab_size=zoo.VOCAB_SIZE, num_hidden_layers=3, num_key_value_heads=2
        ),
        image_token_index=1,
    )
    model: Any = LlavaForConditionalGeneration(config)
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora(target_modules=r".*language_model.*q_proj"))


def test_a_tower_that_never_runs_is_never_read(tmp_path: Path) -> None:
    reads = []
    for num_layers in (1, 6):
        model = llava(num_layers)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        folder = tmp_path / str(num_layers)
        with mt.page(model, optimizer, offload_dir=folder, max_ram_gb=0.0012) as paged:
            started = paged.stats
            before = started.bytes_read, started.bytes_written
            for batch in zoo.batches("llama", 3, 1):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            stats = paged.stats
            reads.append((stats.bytes_read - before[0], stats.bytes_written - before[1]))
    assert reads[0] == reads[1]
    assert reads[0][0] > 0
