"""The monitor under the real strategy, and under another."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from rich.console import Console

from mt_lightning import MegaTrainStrategy
from mt_lightning.callbacks import PagingMonitor, PagingReport
from tests.callbacks.conftest import NUM_LAYERS, WIDTH

Fit = Callable[..., Trainer]
WEIGHT_BYTES = 4 * NUM_LAYERS * (WIDTH * WIDTH + WIDTH)


def make_console() -> Console:
    return Console(file=io.StringIO(), record=True, width=100)


def test_metrics_are_logged_at_every_step(fit: Fit, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = PagingMonitor(tables=False)
    fit([monitor], logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["mt/ram_gib"]]
    assert [int(row["step"]) for row in rows] == list(range(8))
    for row, record in zip(rows, monitor.records, strict=True):
        assert float(row["mt/ram_gib"]) == pytest.approx(record.ram_used_bytes / 1024**3)
        assert float(row["mt/stall_share"]) == pytest.approx(record.stall_share)
        assert float(row["mt/read_gb"]) == pytest.approx(record.read_bytes / 1e9)
        assert float(row["mt/written_gb"]) == pytest.approx(record.written_bytes / 1e9)
        assert float(row["mt/tokens_per_s"]) == pytest.approx(record.tokens_per_s)
    assert {record.num_tokens for record in monitor.records} == {4 * WIDTH}


class Kept(Logger):
    """Keeps what a logger such as TensorBoard's is given, and takes plain numbers only."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.scalars: dict[str, list[int | None]] = {}

    def log_hyperparams(self, *args: object, **kwargs: object) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            assert type(value) in (int, float), name
            self.scalars.setdefault(name, []).append(step)


def test_any_logger_gets_numbers_with_their_step(fit: Fit, tmp_path: Path) -> None:
    logger = Kept()
    fit([PagingMonitor(tables=False)], logger=[logger, CSVLogger(tmp_path)], log_every_n_steps=2)
    assert {"mt/ram_gib", "mt/stall_share", "mt/read_gb", "mt/step_s"} <= logger.scalars.keys()
    assert logger.scalars["mt/ram_gib"] == [1, 3, 5, 7]


@pytest.mark.parametrize("clip", [None, 1.0], ids=["eager", "deferred"])
def test_tables(fit: Fit, clip: float | None) -> None:
    console = make_console()
    monitor = PagingMonitor(console=console)
    strategy = MegaTrainStrategy(max_ram_gb=0.5, durability="step")
    fit([monitor], strategy=strategy, gradient_clip_val=clip, val_check_interval=3)
    text = console.export_text()
    start, end = text.split("What 8 steps took")
    assert start.startswith("What goes where")
    assert f"{'deferred' if clip else 'eager'} update" in start
    assert "limit 512.0 MiB" in end
    engine = strategy.engine
    assert engine is not None
    expected_read, expected_written = engine.expected_bytes_per_step()
    assert expected_written >= 3 * WEIGHT_BYTES  # weights and two moments
    for name, expected in (
        ("read per step", expected_read),
        ("written per step", expected_written),
    ):
        (line,) = (line for line in end.splitlines() if name in line)
        measured = line.split("│")[2].strip()
        assert line.split("│")[3].strip() == f"expected {measured}"
        assert measured == f"{expected / 1024**2:.1f} MiB"
    assert all(len(line) <= 80 for line in end.splitlines())


def test_another_strategy_is_told_once(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    console = make_console()
    monitor, report = PagingMonitor(console=console), PagingReport()
    with caplog.at_level(logging.INFO, logger="mt_lightning"):
        for _ in range(2):
            fit([monitor, report], strategy="auto")
    texts = [record.message for record in caplog.records if "not megatrain" in record.message]
    assert [text.split(":")[0] for text in texts] == ["PagingMonitor", "PagingReport"]
    assert console.export_text() == ""
    assert monitor.records == []


class Failing(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("broken on purpose")


def test_an_error_still_closes(fit: Fit, tmp_path: Path) -> None:
    console = make_console()
    report = PagingReport(tmp_path / "report")
    with pytest.raises(RuntimeError, match="broken on purpose"):
        fit([PagingMonitor(console=console), report, Failing()])
    assert "What 3 steps took" in console.export_text()
    assert "3 optimizer steps" in (tmp_path / "report" / "report.html").read_text()
