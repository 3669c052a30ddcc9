"""Networks whose steps cannot overlap, or whose first window proves little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import networks as nets
from .networks import Output, Tiny


class Tied(Tiny):
    """Head and table share a parameter: two units add to its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class CalledTwice(Tiny):
    """The first block runs once more after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


class Counting(Tiny):
    """Blocks keep running statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(Channels(64))


class Channels(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


SCALE = {"now": 1.0}


def _scale(block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # A hook runs outside of the part that backward runs again.
    return (args[0] * SCALE["now"],)


class GloballyFlagged(Tiny):
    """A global is set before the first unit and put back after the last one."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(_scale)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        SCALE["now"] = 0.5 + float(input_ids.float().mean()) / 100
        try:
            return super().forward(input_ids, labels)
        finally:
            SCALE["now"] = 1.0


class Collecting(Tiny):
    """Blocks append a loss to a list that all of them share; it is emptied in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(self._collect)

    def _collect(self, block: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        self.losses.append(y.square().mean())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        loss = super().forward(input_ids, labels).loss
        loss = loss + 0.1 * sum(self.losses)
        self.losses.clear()
        return Output(loss)


class Switching(Tiny):
    """Which blocks let gradients through is kept in a dict that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.switches = {"open": True}
        for block in self.blocks:
            block.register_forward_hook(self._gate)

    def _gate(self, block: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return y if self.switches["open"] else y + args[0] - args[0].detach()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        self.switches["open"] = bool(input_ids.sum() % 2)
        return super().forward(input_ids, labels)


class AloneBlock(nets.Block):
    def forward(self, x: Tensor) -> Tensor:
        if BUSY["steps"] > 1:
            raise RuntimeError("two steps at once")
        return super().forward(x)


BUSY = {"steps": 0}


class Alone(Tiny):
    """Fails as soon as a second step is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AloneBlock(64) for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        x = self.embed(input_ids)
        BUSY["steps"] += 1
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            BUSY["steps"] -= 1
        return Output(functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Drawing(Tiny):
    """Takes part of its input from an iterator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Iterator[float] = iter([0.01 * n for n in range(99)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        loss = super().forward(input_ids, labels).loss
        return Output(loss * (1.0 + next(self.noise)))


class Remembering(Tiny):
    """Changes a tensor above 1 MiB in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1 << 19))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        self.seen[input_ids.flatten()] += 1.0  # type: ignore[index]
        return super().forward(input_ids, labels)


class ZeroHead(Tiny):
    """In the first step no gradient goes through the head, whose weights are zero."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


class Resting(Tiny):
    """Drops, and a block does not run before the fifth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def hidden(self, input_ids: Tensor) -> Tensor:
        self.num_calls += self.training
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            if number != 1 or self.num_calls > 4:
                x = functional.dropout(block(x), 0.1, self.training)
        return x


class DroppingBlock(nets.Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return functional.dropout(y, 0.1) if bool(x.sum() > 0) else y


class DroppingSometimes(Tiny):
    """Whether a block drops depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock(64) for _ in range(3))


class Meter:
    """An ordinary object that steps change."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.by_length: dict[int, list[Any]] = {}

    def update(self, length: int, loss: Tensor) -> None:
        self.num_seen += 1
        self.by_length.setdefault(length, []).append(loss.detach().clone())
