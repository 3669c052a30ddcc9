"""Long runs stay as they are: memory, descriptors, threads and disk use do not grow."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import mt_lightning as mt

from .nets import Evaluated, loader, make_trainer

NUM_SAMPLES = 100

BOUNDS = {"memory": 16 << 10, "descriptors": 0.0, "threads": 0.0, "disk": 0.0}
"""By how much a thousand steps may grow (bytes, descriptors, threads) beyond plain Lightning.

A page or two of the kernel in a thousand steps is the noise of such a measurement.
"""


class _Measures(Callback):
    """Notes what the process holds, between two steps."""

    def __init__(self, directory: Path, every: int) -> None:
        self._directory = directory
        self._every = every
        self._process = psutil.Process()
        self.rows: dict[str, list[float]] = {name: [] for name in ("step", *BOUNDS)}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % self._every:
            return
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        row = {
            "step": trainer.global_step,
            "memory": self._process.memory_info().rss,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "disk": sum(path.stat().st_blocks * 512 for path in files),
        }
        for name, value in row.items():
            self.rows[name].append(float(value))


def slope(steps: list[float], values: list[float]) -> float:
    """Return the median slope of all pairs (Theil-Sen), per thousand steps."""
    x, y = np.array(steps) / 1000, np.array(values)
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def measure(root: Path, num_steps: int, strategy: Any) -> dict[str, float]:
    """Train with checkpoints and validation at different periods; return the slopes at the end."""
    measures = _Measures(root, max(1, num_steps // NUM_SAMPLES))
    checkpoints = ModelCheckpoint(root / "checkpoints", every_n_train_steps=70, save_top_k=1)
    trainer = make_trainer(
        root,
        strategy,
        max_steps=num_steps,
        max_epochs=-1,
        val_check_interval=50,
        limit_val_batches=2,
        enable_checkpointing=True,
        callbacks=[measures, checkpoints],
    )
    trainer.fit(Evaluated(), loader(100), loader(2))
    half = len(measures.rows["step"]) // 2
    rows = {name: values[half:] for name, values in measures.rows.items()}
    return {name: slope(rows["step"], rows[name]) for name in BOUNDS}


def test_the_slope_is_that_of_most_pairs() -> None:
    steps = [float(step) for step in range(0, 1000, 100)]
    values = [3 * step + 5 for step in steps]
    values[4] = 1e9
    assert slope(steps, values) == pytest.approx(3000)


@pytest.mark.parametrize(
    "num_steps",
    [160, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
)
def test_nothing_grows(tmp_path: Path, num_steps: int) -> None:
    slopes = measure(tmp_path / "paged", num_steps, mt.MegaTrainStrategy(tmp_path / "paged/pages"))
    plain = dict.fromkeys(BOUNDS, 0.0)
    if num_steps > 1000:  # caches still fill before
        plain = measure(tmp_path / "plain", num_steps, "auto")
    print(f"per 1000 steps: {slopes}, plain Lightning: {plain}")
    for name, bound in BOUNDS.items():
        if name == "memory" and num_steps < 1000:
            bound = 16 << 20
        assert slopes[name] - plain[name] <= bound, (name, slopes[name], plain[name])
