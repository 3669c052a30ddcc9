"""The arguments and methods of Hugging Face's Trainer, run by Lightning on paged weights."""

from __future__ import annotations

from mt_lightning.huggingface.trainer.trainer import Trainer

__all__ = ["Trainer"]
