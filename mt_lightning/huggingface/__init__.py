"""Ready LightningModule, data and loading for Hugging Face causal language models."""

from __future__ import annotations

from mt_lightning.huggingface.causal_lm import CausalLMModule
from mt_lightning.huggingface.loading import load_model, load_tokenizer
from mt_lightning.huggingface.text_data import TextDataModule

__all__ = ["CausalLMModule", "TextDataModule", "load_model", "load_tokenizer"]
