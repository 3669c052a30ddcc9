"""A small GPT over characters, and the text that it learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mt_lightning.huggingface.text_data import SHAKESPEARE_PATH


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the model and its batches are."""

    width: int = 128
    """Model dimension."""

    num_layers: int = 4
    """Transformer layers."""

    num_heads: int = 4
    """Attention heads."""

    context: int = 128
    """Characters per sequence."""

    batch_size: int = 12
    """Sequences per step."""


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.num_heads = size.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, sequence, width]`."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class CharGPT(nn.Module):
    """A GPT with learned positions and a head of its own.

    Args:
        size: Its dimensions.
        vocabulary: Number of characters.
    """

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of predicting each next character of `[batch, context + 1]`."""
        x = self.tokens(batch[:, :-1]) + self.positions.weight[: batch.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Text:
    """Shakespeare as characters; the last tenth is held out.

    Args:
        size: Shape of the batches.
    """

    def __init__(self, size: Size) -> None:
        text = SHAKESPEARE_PATH.read_text(encoding="utf-8")
        characters = {c: i for i, c in enumerate(sorted(set(text)))}
        ids = torch.tensor([characters[c] for c in text])
        split = len(ids) * 9 // 10
        self.vocabulary = len(characters)
        self._size = size
        self._train, self._held_out = ids[:split], ids[split:]

    def batch(self, generator: torch.Generator) -> Tensor:
        """Return a random training batch `[batch, context + 1]`."""
        return self._sample(self._train, generator)

    @torch.no_grad()
    def validation_loss(self, model: CharGPT, num_batches: int) -> float:
        """Return the mean loss on held-out batches, the same ones for every model."""
        generator = torch.Generator().manual_seed(0)
        batches = [self._sample(self._held_out, generator) for _ in range(num_batches)]
        return sum(float(model.loss(batch)) for batch in batches) / num_batches

    def _sample(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        length = self._size.context + 1
        count = self._size.batch_size
        starts = torch.randint(len(ids) - length, (count,), generator=generator)
        return torch.stack([ids[start : start + length] for start in starts])


def rate_factor(step: int, num_steps: int, num_warmup: int) -> float:
    """Return the factor on the rate at `step` (from 0): warm-up, then linear to a tenth."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 1 - 0.9 * (step - num_warmup) / max(1, num_steps - num_warmup)
