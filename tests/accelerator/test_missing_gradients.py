"""Pages that miss gradients hold no room on a device once their unit has run backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mt_lightning.engine import idle_gradients, runtime
from mt_lightning.errors import BudgetError

from ..graphs.nets import NUM_LAYERS, WIDTH, Block, Net
from .runs import GIB, check, link_of, smallest_vram_gb


class Experts(Net):
    """Each block has an expert for positive rows and one that no row chooses."""

    class block(Block):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            chosen = int(bool(x.square().sum() < 0))
            return super().forward(x + 0.1 * self.experts[chosen](x))


class FrozenInOptimizer(Net):
    """A layer is frozen, and given to the optimizer all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[NUM_LAYERS - 1].requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "mode"),
    [(Experts, "eager"), (Experts, "clipped"), (FrozenInOptimizer, "accumulated")],
)
def test_the_smallest_budget_is_enough(make: type[Net], mode: str, tmp_path: Path) -> None:
    gb = smallest_vram_gb(make)
    for kind in ("accelerator", "delayed"):
        options: dict[str, Any] = {"max_vram_gb": gb}
        stats = check(make, mode, link_of(kind, 4), tmp_path / kind, **options)
        assert stats.vram_peak_bytes <= gb * GIB


def test_else_it_would_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.complete_idle is idle_gradients.complete_idle
    monkeypatch.setattr(runtime, "complete_idle", lambda *_: False)
    with pytest.raises(BudgetError, match="the gradients of page"):
        check(
            Experts,
            "eager",
            link_of("accelerator", 4),
            tmp_path,
            max_vram_gb=smallest_vram_gb(Experts),
        )


def test_experts_that_are_frozen_by_turns_need_no_more(tmp_path: Path) -> None:
    class Changing(Experts):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.manual_seed(batch_idx)
            for layer in self.layers[batch_idx % 2 :: 2]:
                layer.experts.requires_grad_(bool(batch_idx % 3))  # type: ignore[union-attr]
            return super().training_step(batch, batch_idx)

    gb = smallest_vram_gb(Changing)
    check(Changing, "accumulated", link_of("accelerator", 1), tmp_path, max_vram_gb=gb)
