"""Small networks and batches, of kinds that the order of work could trip over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..parity import zoo

Batch = dict[str, Tensor]


def tokens(count: int, lengths: list[int], *, rows: int = 2, seed: int = 3) -> list[Batch]:
    """Make batches of random tokens; lengths are taken in turn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        shape = (rows, lengths[number % len(lengths)])
        ids = torch.randint(5, zoo.VOCAB_SIZE, shape, generator=generator)
        found.append({"input_ids": ids, "labels": ids})
    return found


def packed(count: int) -> list[Batch]:
    """Make batches of one row that holds several documents: positions begin anew in each."""
    found = tokens(count, [13, 16, 9], rows=1)
    for batch in found:
        length = batch["input_ids"].shape[1]
        cuts = [0, length // 3, length]
        positions = [torch.arange(b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
        batch["position_ids"] = torch.cat(positions)[None]
    return found


def zoo_model(name: str, *, dropout: float = 0.0, tied: bool = False) -> Callable[[], nn.Module]:
    """Return a maker of a network of the zoo."""
    return lambda: zoo.build(name, dropout=dropout, tied=tied)


class Output(NamedTuple):
    loss: Tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # The norm is used twice: within one micro-batch its gradients are added first.
        return x + self.norm(self.down(functional.gelu(self.up(self.norm(x)))))


class Tiny(nn.Module):
    """A stack of blocks between a table of tokens and a head."""

    def __init__(self, width: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.place = nn.Parameter(0.1 * torch.randn(32, width))
        self.embed = nn.Embedding(zoo.VOCAB_SIZE, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, zoo.VOCAB_SIZE)

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.hidden(input_ids))
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Branching(Tiny):
    """A layer rests, depending on the data."""

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place[: input_ids.shape[1]]
        for number, block in enumerate(self.blocks):
            if number != 1 or bool(input_ids.sum() % 2):
                x = block(x)
        return x


class Flagged(Tiny):
    """A flag is set before the first unit and cleared after the last one."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(self._scale)
        self.flag = False

    def _scale(self, block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * 0.5,) if self.flag else args

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        before, self.flag = self.flag, bool(input_ids.sum() % 2)
        try:
            return super().forward(input_ids, labels)
        finally:
            self.flag = before


class StashingBlock(Block):
    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class Stashing(Tiny):
    """Blocks leave a loss of their own on themselves; it is collected in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StashingBlock(64) for _ in range(3))
        self.num_calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        loss = super().forward(input_ids, labels).loss
        self.num_calls += 1
        scale = 1.0 + 0.01 * self.num_calls
        return Output(loss + 0.1 * scale * sum(block.aux for block in self.blocks))  # type: ignore[operator]
