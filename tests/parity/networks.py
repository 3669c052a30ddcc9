"""The two user-written networks of the zoo: a nanoGPT-like model and a small ResNet-like one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Output(NamedTuple):
    """What every network of the zoo returns (transformers models return a superset)."""

    loss: Tensor
    logits: Tensor


class CausalSelfAttention(nn.Module):
    """Multi-head attention with a causal mask."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend over ``hidden`` of shape (batch, time, width)."""
        batch, time, width = hidden.shape
        query, key, value = (
            part.view(batch, time, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(hidden).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        hidden = hidden + self.drop(self.attention(self.norm1(hidden)))
        return hidden + self.drop(self.down(functional.gelu(self.up(self.norm2(hidden)))))


class GPT(nn.Module):
    """A GPT as a user would write it; nothing in it knows of transformers or paging."""

    def __init__(
        self, vocab_size: int, width: int, num_layers: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(64, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """Return the next-token loss and the logits."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.tokens(input_ids) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a skip."""

    def __init__(self, num_channels: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_channels)
        self.conv2 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_channels)
        self.drop = nn.Dropout(dropout)
        self.scale = nn.Linear(num_channels, num_channels)

    def forward(self, image: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        hidden = functional.relu(self.bn1(self.conv1(image)))
        hidden = self.drop(self.bn2(self.conv2(hidden)))
        gate = torch.sigmoid(self.scale(hidden.mean(dim=(2, 3))))
        return functional.relu(image + hidden * gate[:, :, None, None])


class ConvNet(nn.Module):
    """A small residual network with BatchNorm: its forward moves buffers."""

    def __init__(
        self, num_channels: int, num_blocks: int, num_classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_channels, 3, padding=1)
        self.stages = nn.ModuleList(ResidualBlock(num_channels, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(num_channels, num_classes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
        """Return the classification loss and the logits."""
        hidden = self.stem(pixel_values)
        for stage in self.stages:
            hidden = stage(hidden)
        logits = self.head(hidden.mean(dim=(2, 3)))
        return Output(functional.cross_entropy(logits, labels), logits)
