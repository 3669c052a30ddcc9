"""A fit that validates batches together goes on exactly as plain Lightning does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from mt_lightning import MegaTrainStrategy
from mt_lightning.errors import BudgetError

from . import networks as nets
from .run import Batch, Subject, assert_same, fit
from .test_evaluation import VARIED, groups, quiet

__all__ = ["groups", "quiet"]

VALIDATION = nets.tokens(5, [7, 11], seed=5)


class Drawing(Subject):
    """Draws random numbers in validation, and uses some in training."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss * torch.rand(())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("drawn", torch.rand(4).sum(), batch_size=1)


class Saves(pl.Callback):
    """Looks at the weights when a batch of validation ends."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append({name: value.clone() for name, value in module.state_dict().items()})


def limit_gb(directory: Path, **settings: Any) -> float:
    strategy = MegaTrainStrategy(layer_major=True, max_ram_gb=1e-5)
    with pytest.raises(BudgetError) as refusal:
        fit(directory, make, VARIED, strategy, val_batches=VALIDATION, **settings)
    assert refusal.value.smallest_gb is not None
    # Room for what the batches hold, beside one more gradient.
    return refusal.value.smallest_gb + 100 / 2**20


def make() -> nn.Module:
    return nets.Tiny(num_layers=6)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 4, "val_check_interval": 3, "max_epochs": 2},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        pytest.param({"gradient_clip_val": 0.1, "subject": Drawing}, marks=pytest.mark.slow),
        {"val_check_interval": 3, "num_sanity_val_steps": 3, "subject": Drawing},
        {"val_check_interval": 4, "precision": "bf16-mixed", "inference_mode": False},
    ],
    ids=["mid_window", "deferred", "draws_deferred", "sanity", "no_grad"],
)
def test_a_fit_with_validation(settings: dict[str, Any], tmp_path: Path, groups: list[int]) -> None:
    max_ram_gb = limit_gb(tmp_path, **settings)
    saves: list[Saves] = []
    outcomes = []
    for strategy in (None, MegaTrainStrategy(layer_major=True, max_ram_gb=max_ram_gb)):
        saves.append(Saves())
        more = {"callbacks": (saves[-1],), "val_batches": VALIDATION, **settings}
        outcomes.append(fit(tmp_path, make, VARIED, strategy, **more))
    assert_same(*outcomes)
    for expected, found in zip(saves[0].seen, saves[1].seen, strict=True):
        assert_same(expected, found)
    assert max(groups) > 1
    assert strategy is not None
    assert strategy.engine is not None
    assert strategy.engine.stats.ram_peak_bytes <= max_ram_gb * 2**30


def test_validating_before_and_after_a_fit(tmp_path: Path, groups: list[int]) -> None:
    found = []
    for paged in (False, True):
        torch.manual_seed(3)
        module = Drawing(make())
        strategy = MegaTrainStrategy(max_ram_gb=limit_gb(tmp_path)) if paged else "auto"
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        loaders = [torch.utils.data.DataLoader(b, batch_size=None) for b in (VARIED, VALIDATION)]  # type: ignore[arg-type]
        before = trainer.validate(module, loaders[1], verbose=False)
        trainer.fit(module, *loaders)
        after = trainer.validate(module, loaders[1], verbose=False)
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        found.append({"logs": [before, after], "weights": weights, "rng": torch.get_rng_state()})
    assert_same(*found)
    assert max(groups) > 1
