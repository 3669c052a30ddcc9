"""Weights that code reads beside their module stay in memory where `resident` names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mt_lightning as mt
from mt_lightning.errors import BudgetError, ConfigError, StepError

from .loops import TOKENS, Block, differences

WORDS = 256
"""With this many the head is too large to stay in memory by rule."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.blocks = nn.ModuleList(Block(24) for _ in range(2))
        self.lm_head = nn.Linear(24, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.lm_head.weight)  # as TRL's trainers do


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embed.weight


class FrozenHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.requires_grad_(False)


class InALayer(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        up: Any = self.blocks[1].up
        return super().forward(tokens) + up.weight.square().mean()


KINDS: dict[Callable[[], Net], tuple[list[str], str]] = {
    Net: (["lm_head"], "resident=['lm_head']"),
    Tied: (["lm_head"], "resident=[...]"),  # its unit ran, for the embeddings
    FrozenHead: (["lm_head"], "resident=['lm_head']"),
    InALayer: (["lm_head", "blocks.1.up"], "resident=['lm_head']"),
}
"""What has to stay, and what the first refusal says of it."""


def _train(kind: Callable[[], Net], pages: dict[str, Any] | None) -> list[Tensor]:
    torch.manual_seed(0)
    net = kind()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    handle = mt.page(net, optimizer, **pages) if pages is not None else None
    seen: list[Tensor] = []
    try:
        for step in range(3):
            for batch in TOKENS[2 * step : 2 * step + 2]:
                logits = net(batch[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
                loss.backward()
                seen.append(loss.detach())
            seen.append(nn.utils.clip_grad_norm_(trained, 0.5))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if handle is not None:
            handle.close(failed=len(seen) < 9)
    return [*seen, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_gives_the_bits_of_the_plain_loop_which_is_refused_without_it(
    kind: type[Net], tmp_path: Path
) -> None:
    resident, advice = KINDS[kind]
    with pytest.raises(StepError, match=re.escape(advice)):
        _train(kind, {"offload_dir": tmp_path / "refused"})
    pages = {
        "offload_dir": tmp_path / "pages",
        "resident": resident,
        "max_ram_gb": _smallest(kind, resident),
    }
    assert differences(_train(kind, None), _train(kind, pages)) == []


def _smallest(kind: Callable[[], Net], resident: list[str]) -> float:
    net = kind()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    with pytest.raises(BudgetError) as caught:
        mt.page(net, optimizer, max_ram_gb=1e-6, resident=resident)
    assert caught.value.smallest_gb is not None
    return caught.value.smallest_gb


def test_the_budget_pays_for_what_stays_and_says_so(tmp_path: Path) -> None:
    net = Net()
    net.lm_head = nn.Linear(24, 1 << 14, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(BudgetError, match=r"Of it 7\.. MiB are for weights that stay in memory"):
        mt.page(net, optimizer, max_ram_gb=1e-3, resident="lm_head", offload_dir=tmp_path / "pages")


def test_a_name_of_no_module_is_refused_with_those_that_are_near(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resident=\['head'\].*is called head.*lm_head"):
        mt.page(Net(), resident="head", offload_dir=tmp_path / "pages")
