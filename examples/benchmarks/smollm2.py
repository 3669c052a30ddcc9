"""SmolLM2-135M and the batches that it is fine-tuned on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

import mt_lightning as mt
from mt_lightning.huggingface.loading import load_model

SEQUENCE_LENGTH = 256
"""Tokens of a batch, which is one sequence."""


def load() -> PreTrainedModel:
    """Return the model in float32, ready to train; the same weights every time."""
    model = load_model("smollm2", dtype=torch.float32)
    model.config.use_cache = False
    return model.train()


def training_batches(seed: int) -> Iterator[Tensor]:
    """Yield batches of tokens `[1, 256]` without end, in an order of the seed."""
    data = mt.TextDataModule(tokenizer="smollm2", sequence_length=SEQUENCE_LENGTH, seed=seed)
    data.setup()
    loader = data.train_dataloader()
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            yield batch["input_ids"]
        epoch += 1


@torch.no_grad()
def validation_loss(model: PreTrainedModel, num_batches: int) -> float:
    """Return the mean loss on the first held-out batches, the same ones for every model."""
    data = mt.TextDataModule(tokenizer="smollm2", sequence_length=SEQUENCE_LENGTH)
    data.setup()
    losses = []
    for batch, _ in zip(data.val_dataloader(), range(num_batches), strict=False):
        ids = batch["input_ids"]
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    return sum(losses) / len(losses)
