from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep every test out of the user's cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MT_LIGHTNING_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """Give a function that builds a Llama over bytes; the same weights every time."""

    def make(hidden_size: int = 32, num_hidden_layers: int = 2) -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=257,
                hidden_size=hidden_size,
                intermediate_size=2 * hidden_size,
                num_hidden_layers=num_hidden_layers,
                num_attention_heads=2,
                num_key_value_heads=2,
            )
        )

    return make
