"""A small model and a plain loop over it, with and without pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mt_lightning as mt

TOKENS = torch.randint(32, (12, 2, 9), generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embeddings, three blocks and a head that is tied to the embeddings."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adamw(net: nn.Module) -> Optimizer:
    """AdamW with two groups of weight decay."""
    params = list(net.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def make(optimizer: Callable[[nn.Module], Optimizer] = adamw) -> tuple[Net, Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, optimizer(net)


def loss_of(net: nn.Module, number: int = 0) -> Tensor:
    batch = TOKENS[number]
    return nn.functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def loop(
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    pages: dict[str, Any] | None = None,
    num_steps: int = 3,
    max_norm: float | None = 0.5,
) -> tuple[list[Any], Net]:
    """Train; return all that must be the same, and the model."""
    net, opt = make(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    paged = mt.page(net, opt, **pages) if pages is not None else None
    seen: list[Any] = []
    for step in range(num_steps):
        for half in range(2):
            loss = loss_of(net, 2 * step + half) / 2
            loss.backward()
            seen.append(loss.detach())
        if max_norm is not None:
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), max_norm))
        opt.step()
        scheduler.step()
        opt.zero_grad()
        net.eval()
        with torch.no_grad():
            seen.append(loss_of(net))
        net.train()
    if paged is not None:
        paged.close()
    seen += [p.detach().clone() for p in net.parameters()]
    state = opt.state_dict()
    seen += [v for each in state["state"].values() for v in each.values()]
    return [*seen, torch.tensor([group["lr"] for group in state["param_groups"]])], net


def differences(expected: list[Any], actual: list[Any]) -> list[int]:
    assert len(expected) == len(actual)
    pairs = enumerate(zip(expected, actual, strict=True))
    return [
        i
        for i, (a, b) in pairs
        if not (torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b)
    ]
