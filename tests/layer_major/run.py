"""One fit with accumulation, and everything that must not depend on the order of work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

Batch = dict[str, Tensor]


class Subject(pl.LightningModule):
    """Trains a network that returns an output with a loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.network(**batch).loss
        self.losses.append(loss.detach().clone())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.network(**batch).loss, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(params, lr=1e-3)


class Events(pl.Callback):
    """Notes hooks in the order they are called, with what they can see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _note(self, name: str, trainer: pl.Trainer, *more: Any) -> None:
        self.seen.append((name, trainer.global_step, trainer.current_epoch, *more))

    def _note_metrics(self, name: str, trainer: pl.Trainer) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self._note(name, trainer, sorted(metrics.items()))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._note("on_train_batch_start", trainer, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_accumulate():
            loss = float(outputs["loss"]) if outputs else None
            self._note("on_train_batch_end", trainer, batch_idx, loss)
        else:
            self._note("on_train_batch_end", trainer, batch_idx)

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._note("on_before_zero_grad", trainer)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._note_metrics("on_validation_start", trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._note_metrics("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note_metrics("on_train_epoch_end", trainer)


def fit(
    directory: Path,
    make: Callable[[], nn.Module],
    batches: list[Batch],
    strategy: pl.strategies.Strategy | None,
    *,
    subject: type[Subject] = Subject,
    callbacks: tuple[pl.Callback, ...] = (),
    val_batches: list[Batch] | None = None,
    loggers: Any = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train; return weights, optimizer state, losses, events and metrics."""
    torch.manual_seed(7)
    module = subject(make())
    events = Events()
    settings.setdefault("max_epochs", 1)
    settings.setdefault("num_sanity_val_steps", 0)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy or "auto",
        logger=loggers,
        callbacks=[events, *callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **settings,
    )
    loaders = [DataLoader(each, batch_size=None) for each in (batches, val_batches) if each]
    trainer.fit(module, *loaders)
    state = trainer.optimizers[0].state_dict()["state"]
    return {
        "losses": module.losses,
        "events": events.seen,
        "global_step": trainer.global_step,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "buffers": {name: b.detach().clone() for name, b in module.named_buffers()},
        "moments": {
            f"{i}/{key}": value.clone()
            for i, each in state.items()
            for key, value in each.items()
            if isinstance(value, Tensor)
        },
        "rng": torch.get_rng_state(),
    }


def assert_same(expected: Any, found: Any, path: str = "") -> None:
    """Compare two outcomes, bit for bit."""
    if isinstance(expected, Tensor):
        assert torch.equal(expected, found), f"{path}: {(expected - found).abs().max()}"
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys(), path
        for key, value in expected.items():
            assert_same(value, found[key], f"{path}/{key}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], Tensor):
        assert len(expected) == len(found), path
        for number, value in enumerate(expected):
            assert_same(value, found[number], f"{path}/{number}")
    else:
        assert expected == found, path
