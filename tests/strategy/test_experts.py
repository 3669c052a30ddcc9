"""Experts that are modules of their own are paged one by one, and only those with tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from mt_lightning import AccessRecorder, MegaTrainStrategy
from mt_lightning.pager.predictor import FORWARD

WIDTH, NUM_EXPERTS, NUM_LAYERS, NUM_STEPS = 64, 8, 2, 6


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(NUM_EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return x + out


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture() for _ in range(NUM_LAYERS)])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Decay and momentum move a weight without a gradient, if it is stepped at all.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def fit(tmp_path: Path, **settings: Any) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = Model()
    calls = [0]
    for module in model.modules():
        if isinstance(module, Expert):
            module.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    # Few rows that differ from step to step: most experts get none, and some only later.
    data = torch.randn(NUM_STEPS, 2, WIDTH) * 3
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **settings,
    ).fit(model, DataLoader(data, batch_size=1))
    return {name: value.clone() for name, value in model.state_dict().items()}, calls[0]


def test_each_expert_is_a_unit_and_every_bit_is_that_of_plain_lightning(tmp_path: Path) -> None:
    for clip in (None, 0.5):
        expected, num_calls = fit(tmp_path, gradient_clip_val=clip)
        assert num_calls < NUM_STEPS * NUM_LAYERS * NUM_EXPERTS
        limit_gb = 0.001
        paged = MegaTrainStrategy(
            tmp_path / f"pages{clip}", max_ram_gb=limit_gb, units=["Expert"], durability="step"
        )
        path = tmp_path / "trace.json"
        found, _ = fit(
            tmp_path, gradient_clip_val=clip, strategy=paged, callbacks=[AccessRecorder(path)]
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        engine = paged.engine
        assert engine is not None
        assert engine.plan is not None
        assert engine.plan.num_units >= NUM_LAYERS * NUM_EXPERTS
        assert engine.stats.reloads > 0
        assert engine.stats.ram_peak_bytes <= limit_gb * 2**30
        trace = json.loads(path.read_text())
        bound = [
            unit
            for step in trace["steps"]
            for unit, kind in step
            if kind == FORWARD and ".experts." in trace["units"][unit]
        ]
        assert len(bound) == num_calls, "an expert without a token was bound"
