"""The run in virtual time makes the calls that a run makes, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.engine.options import Options
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pages.table import Page
from mt_lightning.planning.machines import find_machine
from mt_lightning.planning.planner import answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import estimate_work

WIDTH, DEPTH, NUM_STEPS = 256, 5, 4
Call = tuple[str, int]


class Stack(LightningModule):
    """A stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Note which pages are pinned and which jobs are submitted, by whoever does it."""
    seen: list[Call] = []
    pin, submit = WeightPool.pin, UpdateWorker.submit

    def noted_pin(self: WeightPool, page: Page) -> PoolEntry:
        seen.append(("pin", page.index))
        return pin(self, page)

    def noted_submit(self: UpdateWorker, run, page, *rest) -> None:
        seen.append(("submit", -1 if page is None else page))
        submit(self, run, page, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(WeightPool, "pin", noted_pin)
        patch.setattr(UpdateWorker, "submit", noted_submit)
        yield seen


def last_step(seen: list[Call], micros: int) -> list[Call]:
    """Return the calls of the last step: from a first pin of the first unit's page to another."""
    starts, passed = [], True
    for position, call in enumerate(seen):
        if call == ("pin", 0) and passed:
            starts.append(position)
            passed = False
        elif call == ("pin", DEPTH - 1):
            passed = True
    return seen[starts[-1 - micros] : starts[-1]]


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_pages_are_pinned_and_updated_in_the_order_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clips: bool, micros: int
) -> None:
    options = Options(max_ram_gb=32 / 1024, layer_major=False, recompute=True, durability="step")
    strategy = mt.MegaTrainStrategy(
        offload_dir=tmp_path / "pages",
        max_ram_gb=options.max_ram_gb,
        layer_major=False,
        recompute=True,
        durability="step",
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=NUM_STEPS,
        accumulate_grad_batches=micros,
        gradient_clip_val=1.0 if clips else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = DataLoader([torch.randn(WIDTH) for _ in range(NUM_STEPS * micros)])
    with calls(monkeypatch) as ran:
        trainer.fit(Stack(), data)

    with torch.device("meta"):
        model = Model.of("stack", Stack())
    training = Training(accumulate_grad_batches=micros, clips_norm=clips, options=options)
    work = estimate_work(model.units, 1, "")
    found = answer(model, training, find_machine("dgx-spark"), lambda _: work)
    assert found.fits, found.lacks
    with calls(monkeypatch) as played:
        simulate(found, num_warm=NUM_STEPS, num_steps=1)
    took = last_step(ran, micros)
    assert {kind for kind, _ in took} == {"pin", "submit"}
    assert last_step(played, micros) == took
