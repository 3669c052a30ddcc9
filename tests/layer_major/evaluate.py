"""One validation, test or prediction, and everything that must not depend on the order of work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from mt_lightning import MegaTrainStrategy

Batch = dict[str, Tensor]


class Evaluated(pl.LightningModule):
    """Evaluates a network that returns an output with a loss, and logs in every way."""

    measures_last = True
    """Whether no unit runs after a metric is updated, so that no later batch has updated it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.mean = MeanMetric()
        self.losses: list[Tensor] = []
        self.begun: list[int] = []
        self.num_steps = 0

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.begun.append(batch_idx)
        self.log("begun", float(batch_idx), on_step=True, on_epoch=True)
        loss = self.network(**batch).loss
        self.num_steps += 1
        self.losses.append(loss.clone())
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log(f"of_{dataloader_idx}", loss, add_dataloader_idx=False)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1 + batch_idx % 3)
        self.log("most", loss, reduce_fx="max", prog_bar=True)
        return {"loss": loss, "batch_idx": batch_idx}

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"loss": self.network(**batch).loss, "where": (dataloader_idx, batch_idx)}


class Lines(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, sorted(metrics.items())))


class Ends(pl.Callback):
    """Notes what can be seen when a batch or a run ends."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _note(self, name: str, trainer: Any, *more: Any) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        shown = {key: float(value) for key, value in trainer.progress_bar_metrics.items()}
        logged = {key: float(value) for key, value in trainer.logged_metrics.items()}
        self.seen.append((name, sorted(metrics.items()), shown, logged, *more))

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        progress = trainer._evaluation_loop.batch_progress
        counts = (progress.current.state_dict(), progress.total.state_dict())
        more = [float(outputs["loss"]), outputs["batch_idx"]]
        if module.measures_last:
            more.append(float(module.mean.mean_value))
        self._note("batch", trainer, batch_idx, loader, counts, progress.is_last_batch, *more)

    on_test_batch_end = on_validation_batch_end

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, loader: int = 0
    ) -> None:
        progress = trainer.predict_loop.batch_progress
        counts = (progress.current.state_dict(), progress.is_last_batch)
        self.seen.append(("batch", outputs, batch_idx, loader, counts))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note("epoch", trainer)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        self.written.append(given)

    def write_on_epoch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        self.written.append(given)


def budget_gb(network: nn.Module, share: float = 0.75) -> float:
    """Return a budget below the weights of a network."""
    return share * sum(p.numel() * p.element_size() for p in network.parameters()) / 2**30


def paged(network: nn.Module, layer_major: Any = True, share: float = 0.75) -> MegaTrainStrategy:
    """Return a strategy under which the weights do not fit in RAM."""
    return MegaTrainStrategy(layer_major=layer_major, max_ram_gb=budget_gb(network, share))


def evaluate(
    directory: Path,
    kind: str,
    make: Callable[[], nn.Module],
    loaders: Any,
    strategy: pl.strategies.Strategy | None,
    *,
    subject: type[pl.LightningModule] = Evaluated,
    callbacks: tuple[pl.Callback, ...] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Validate, test or predict; return results, logs, events and the state that is left."""
    torch.manual_seed(7)
    module = subject(make())
    ends, lines, writer = Ends(), Lines(), Writer()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy or "auto",
        logger=lines,
        callbacks=[ends, *([writer] if kind == "predict" else []), *callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **settings,
    )
    torch.manual_seed(8)
    more = {} if kind == "predict" else {"verbose": False}
    result = getattr(trainer, kind)(module, loaders, **more)
    own = {name: module.__dict__.get(name) for name in ("losses", "begun", "num_steps", "found")}
    return {
        "result": result,
        "ends": ends.seen,
        "lines": lines.lines,
        "written": writer.written,
        "own": own,
        "rng": torch.get_rng_state(),
    }


def loader(batches: list[Batch], **settings: Any) -> DataLoader[Any]:
    """Return a loader that gives the batches as they are."""
    return DataLoader(batches, batch_size=None, **settings)  # type: ignore[arg-type]


def assert_equal(expected: Any, found: Any, path: str = "") -> None:
    """Compare two outcomes, bit for bit."""
    assert type(expected) is type(found), (path, expected, found)
    if isinstance(expected, Tensor):
        assert torch.equal(expected, found), f"{path}: {expected} {found}"
    elif isinstance(expected, dict):
        assert list(expected) == list(found), path
        for key, value in expected.items():
            assert_equal(value, found[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found), path
        for number, value in enumerate(expected):
            assert_equal(value, found[number], f"{path}/{number}")
    else:
        assert expected == found, path
