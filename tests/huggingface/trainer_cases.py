"""Small data, models and arguments for the tests of `mt.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainingArguments,
)

VOCABULARY = 97


def llama(**settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))


def gpt2() -> PreTrainedModel:
    """Give a model with dropout and tied weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1
    )
    config.eos_token_id = 2
    return GPT2LMHeadModel(config)


def samples(count: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Give samples with different numbers of labels."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, 6, (1,), generator=generator))] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 20,
        "learning_rate": 1e-3,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
        "seed": 3,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **settings})


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
