"""SFTTrainer and DPOTrainer of TRL train a paged model to the same bits, where TRL is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt
from mt_lightning.huggingface.byte_tokenizer import byte_tokenizer

trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")

CASES: dict[str, dict[str, Any]] = {
    "sft": {"bf16": True},
    "sft with nll": {"loss_type": "nll", "gradient_checkpointing": True},
    "sft with adapters": {},
    "dpo": {},
    "dpo with log probabilities made first": {"precompute_ref_log_probs": True},
    "dpo with adapters": {},
}
KEYS = ("loss", "grad_norm", "mean_token_accuracy", "rewards/margins", "logps/chosen")


def _llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )


def _train(case: str, root: Path, *, paged: bool) -> tuple[list[torch.Tensor], list[Any]]:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    sft, adapters = case.startswith("sft"), case.endswith("adapters")
    rows = [
        {"text": f"row {i} " * (1 + i % 3)}
        if sft
        else {"prompt": f"is it {i}? ", "chosen": "yes " * (1 + i % 2), "rejected": "no"}
        for i in range(8)
    ]
    arguments = {
        "output_dir": str(root / "out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "max_length": 64,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **CASES[case],
    }
    reference = _llama(tied=sft) if case == "dpo" else None
    more = {} if sft else {"ref_model": reference}
    kind, config = (trl.SFTTrainer, trl.SFTConfig) if sft else (trl.DPOTrainer, trl.DPOConfig)
    handles = []
    settings: dict[str, Any] = {"max_ram_gb": 0.1, "resident": "lm_head"}
    if paged and reference is not None:
        handles.append(mt.page(reference, offload_dir=root / "reference", **settings))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = kind(
        model=_llama(tied=sft),
        args=config(**arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora if adapters else None,
        **more,
    )
    if paged:
        optimizer = trainer.create_optimizer()
        handles.append(mt.page(trainer.model, optimizer, offload_dir=root / "pages", **settings))
    trainer.train()
    for handle in handles:
        handle.close()
    log = [[entry.get(key) for key in KEYS] for entry in trainer.state.log_history]
    return [p.detach().clone() for p in trainer.model.parameters()], log


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES)
def test_gives_the_bits_of_the_trainer_without_pages(case: str, tmp_path: Path) -> None:
    expected, logged = _train(case, tmp_path / "plain", paged=False)
    actual, log = _train(case, tmp_path / "paged", paged=True)
    assert log == logged
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
