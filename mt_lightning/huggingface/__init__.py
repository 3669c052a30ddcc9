"""Hugging Face: loading, a ready LightningModule and data, and a Trainer of the same arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mt_lightning.huggingface.causal_lm import CausalLMModule
from mt_lightning.huggingface.data.sources import load_dataset
from mt_lightning.huggingface.loading import from_pretrained, load_model, load_tokenizer
from mt_lightning.huggingface.session import init
from mt_lightning.huggingface.text_data import TextDataModule
from mt_lightning.huggingface.text_samples import TextSamples

if TYPE_CHECKING:
    from mt_lightning.huggingface.trainer import Trainer

__all__ = [
    "CausalLMModule",
    "TextDataModule",
    "TextSamples",
    "Trainer",
    "from_pretrained",
    "init",
    "load_dataset",
    "load_model",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        # On first use: it needs accelerate, which the rest does without.
        from mt_lightning.huggingface.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
