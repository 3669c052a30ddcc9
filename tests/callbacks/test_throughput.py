"""ThroughputMonitor counts the share of what the device can do in the dtype that is at work."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from tests.callbacks.conftest import Net

Fit = Callable[..., Trainer]
PEAKS = {torch.float32: 1e9, torch.bfloat16: 8e9}


@pytest.fixture(autouse=True)
def _known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (
        "lightning.pytorch.callbacks.throughput_monitor",
        "mt_lightning.plugins.throughput",
    ):
        monkeypatch.setattr(f"{where}.get_available_flops", lambda device, dtype: PEAKS[dtype])


class Counted(Net):
    flops_per_batch = 1000


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_share_is_that_of_plain_training(fit: Fit, tmp_path: Path, precision: str) -> None:
    peaks = []
    for strategy in ("auto", "megatrain"):
        monitor = ThroughputMonitor(batch_size_fn=len, window_size=3)
        logger = CSVLogger(tmp_path / strategy)
        settings = {"precision": precision, "logger": logger, "log_every_n_steps": 1}
        fit([monitor], module=Counted(), strategy=strategy, **settings)
        peaks.append(monitor.available_flops)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["train/device/mfu"]]
        assert rows
        for row in rows:
            share = float(row["train/device/flops_per_sec"]) / peaks[0]
            assert float(row["train/device/mfu"]) == pytest.approx(share)
    assert (
        peaks[0] == peaks[1] == PEAKS[torch.float32 if precision == "32-true" else torch.bfloat16]
    )
