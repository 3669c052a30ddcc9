"""Where the time of a step went: nothing is missing, and a slow drive is seen as one."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset

import mt_lightning as mt
from mt_lightning.callbacks.meter import PARTS
from mt_lightning.tiers.doubles import ThrottledStore
from tests.callbacks.conftest import WIDTH, Net

Fit = Callable[..., Trainer]
WIDE = 512
NUM_LAYERS = 5


class Wide(Net):
    """Layers of a megabyte each, for a batch of the usual size."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH, *[WIDE] * NUM_LAYERS, WIDTH]
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)  # without state: weights alone move


def smallest_gb(fit: Fit, **options: Any) -> float:
    with pytest.raises(mt.BudgetError) as caught:
        fit([], module=Wide(), strategy=mt.MegaTrainStrategy(max_ram_gb=1e-6, **options))
    return caught.value.smallest_gb


@pytest.mark.parametrize("order", ["eager", "deferred"])
def test_stalls_are_the_shortfall_of_the_drive(fit: Fit, tmp_path: Path, order: str) -> None:
    options: dict[str, Any] = {"durability": "step", "recompute": True}
    budget_gb = smallest_gb(fit, **options) + 1.5 * WIDE * WIDE * 4 / 2**30
    speed = 15e6
    throttle = functools.partial(
        ThrottledStore, read_bytes_per_s=speed, write_bytes_per_s=float("inf")
    )
    console = Console(file=io.StringIO(), record=True, width=100)
    monitor = mt.PagingMonitor(console=console)
    strategy = mt.MegaTrainStrategy(
        offload_dir=tmp_path / "pages", max_ram_gb=budget_gb, _wrap_store=throttle, **options
    )
    clip = 1.0 if order == "deferred" else None
    fit([monitor], module=Wide(), strategy=strategy, max_steps=5, gradient_clip_val=clip)
    records = monitor.records[2:]
    drive_s = sum(record.read_bytes for record in records) / speed
    stall_s = sum(record.stall_read_s + record.behind_read_s for record in records)
    other_s = sum(record.wall_s for record in records) - stall_s
    assert drive_s > 0.1
    # What is not waited for was read while something else was done; while training waits for a
    # read the drive is at work. A read under way at either end may belong to the step beside.
    edge_s = 2 * WIDE * WIDE * 4 / speed
    assert drive_s - other_s - edge_s <= stall_s
    assert stall_s <= sum(record.drive_read_s for record in records) + edge_s
    assert "Bottleneck: drive reads" in console.export_text().replace("\n", " ")


class SlowLoader(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.01)
        return {"input_ids": torch.full((WIDTH,), index)}


class SlowModel(Net):
    validation_step = LightningModule.validation_step

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


class SlowHook(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        time.sleep(0.04)


@pytest.mark.parametrize("layer_major", [False, True])
def test_every_moment_of_a_step_is_somewhere(tmp_path: Path, layer_major: bool) -> None:
    monitor = mt.PagingMonitor(tables=False)
    strategy = mt.MegaTrainStrategy(durability="step", layer_major=layer_major)
    trainer = Trainer(
        callbacks=[SlowHook(), monitor], strategy=strategy, accelerator="cpu", max_epochs=1,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(SlowLoader(), batch_size=1)
    begin_s = time.perf_counter()
    trainer.fit(SlowModel(), loader)
    took_s = time.perf_counter() - begin_s
    records = monitor.records
    assert len(records) == 4
    wall_s = sum(record.wall_s for record in records)
    assert wall_s <= took_s
    for record in records:
        assert record.wall_s == pytest.approx(sum(getattr(record, part) for part in PARTS))
        assert all(getattr(record, part) >= 0 for part in PARTS)
        assert record.compute_s >= 2 * 0.02
        assert record.host_s >= 0.04 + 0.01  # the hook of the batch before runs behind its record
    later = records[1:]
    assert sum(record.host_s for record in later) >= 3 * 2 * (0.04 + 0.01)
    assert sum(record.between_s for record in later) >= 3 * 2 * 0.01
