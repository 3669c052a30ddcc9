"""A run that tells everything it does, so that two can be compared from any step on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from mt_lightning import MegaTrainStrategy

VOCAB, WIDTH = 100, 32


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings of a Trainer that writes nothing."""


class StoppedError(Exception):
    """What ends a run before its end."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Told(LightningModule):
    """Writes down losses, sample ids and logged values, and stops where it is told to."""

    def __init__(
        self, stop: int | None, optimizer: str = "adamw", rate: float | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.mean = MeanMetric()
        self.stop = stop
        self.optimizer = optimizer
        self.rate = rate
        self.batches: list[Any] = []
        self.events: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss_of(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(self.batches) == self.stop:
            raise StoppedError
        loss = self.loss_of(batch)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.batches.append((self.global_step, batch_idx, batch[:, 0].tolist(), loss.item()))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss_of(batch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.events.append(("validation", self.global_step))

    def on_train_epoch_end(self) -> None:
        shown = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.events.append(("epoch", self.current_epoch, self.global_step, rate, shown))

    def configure_optimizers(self) -> Any:
        kinds = {
            "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=self.rate or 1e-3),
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9),
            "adafactor": lambda: torch.optim.Adafactor(self.parameters(), lr=1e-3),
        }
        optimizer = kinds[self.optimizer]()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300 if self.rate else 30)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Counting(Callback):
    """A callback with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Tokens(Dataset):
    """Samples with noise from the global generator, as an augmentation has it."""

    def __init__(self, length: int, noisy: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCAB, (length, 9), generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        tokens = self.tokens[index].clone()
        if self.noisy:
            tokens[3] = torch.randint(VOCAB, ())
        return tokens


def train(
    strategy: Any,
    *,
    stop: int | None = None,
    seed: int = 0,
    workers: int = 0,
    noisy: bool = False,
    optimizer: str = "adamw",
    max_steps: int = 17,
    num_samples: int = 21,
    rate: float | None = None,
    ckpt_path: Path | None = None,
    more_callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Told:
    """Train until the end or until `stop` batches have been taken; everything is new each time."""
    seed_everything(seed)
    module = Told(stop, optimizer, rate)
    module.counting = Counting()
    saves = any(isinstance(callback, ModelCheckpoint) for callback in more_callbacks)
    trainer = Trainer(
        strategy=strategy,
        max_steps=max_steps,
        max_epochs=-1,
        val_check_interval=min(4, num_samples // 2),
        callbacks=[module.counting, *more_callbacks],
        **{**QUIET, "enable_checkpointing": saves},
        **settings,
    )
    loader = DataLoader(Tokens(num_samples, noisy), batch_size=2, shuffle=True, num_workers=workers)
    validation = DataLoader(Tokens(4, False), batch_size=2)
    try:
        trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    except StoppedError:
        assert stop is not None
    return module


def paged(directory: Path, **settings: Any) -> MegaTrainStrategy:
    defaults = {"offload_dir": directory, "max_ram_gb": 0.1, "durability": "step"}
    return MegaTrainStrategy(**{**defaults, **settings})


def interrupt(directory: Path, stop: int, paging: dict[str, Any], **run: Any) -> None:
    """Train to `stop` and leave the directory as the process would that ends there."""
    module = train(paged(directory, **paging), stop=stop, **run)
    module.trainer.strategy._close()


def resume(directory: Path, paging: dict[str, Any], **run: Any) -> Told:
    """Go on in objects that know nothing of the run before, from another seed."""
    strategy = paged(directory, on_existing="resume", **paging)
    module = train(strategy, seed=99, **run)
    strategy._close()
    return module


def assert_goes_on_as(expected: Told, actual: Told) -> int:
    """Compare a resumed run with the end of an uninterrupted one; return where it began."""
    skipped = len(expected.batches) - len(actual.batches)
    assert actual.batches == expected.batches[skipped:]
    assert actual.events == expected.events[len(expected.events) - len(actual.events) :]
    assert actual.counting.count == expected.counting.count
    found = actual.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
    for name, value in expected.named_buffers():
        assert torch.equal(dict(actual.named_buffers())[name], value), name
    assert actual.trainer.global_step == expected.trainer.global_step
    assert actual.trainer.current_epoch == expected.trainer.current_epoch
    return skipped
