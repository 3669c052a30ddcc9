"""Nets of all kinds, the checkpoints they leave, and what has to be equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.tiers.manifest import Manifest
from mt_lightning.tiers.manifest_reader import read_manifest

VOCAB, WIDTH = 50, 32


class Block(nn.Module):
    """A residual block: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(LightningModule):
    """A small language model: tied embeddings, a frozen layer, buffers of both kinds."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.layers[1].up.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.long))
        self.register_buffer("factor", torch.full((1,), 0.5), persistent=False)
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        self.seen += 1
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x * self.scale * self.factor)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-2)


def loader(num_batches: int = 12) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCAB, (2 * num_batches, 9), generator=generator)
    return DataLoader(rows, batch_size=2)  # pyright: ignore[reportArgumentType]


def linked() -> mt.PagedCheckpointIO:
    return mt.PagedCheckpointIO(format="linked")


def paged(directory: Path | list[Path], **settings: Any) -> mt.MegaTrainStrategy:
    return mt.MegaTrainStrategy(
        **{"offload_dir": directory, "max_ram_gb": 0.1, "durability": "step", **settings}
    )


def fit(
    root: Path,
    strategy: Any,
    *,
    module: LightningModule | None = None,
    io: mt.PagedCheckpointIO | None = None,
    saves: dict[str, Any] | None = None,
    ckpt_path: Path | str | None = None,
    **settings: Any,
) -> Trainer:
    """Train a net; `saves` are the settings of ModelCheckpoint, which then saves in `root`/ck."""
    callbacks = [ModelCheckpoint(root / "ck", **saves)] if saves is not None else []
    defaults = {
        "accelerator": "cpu",
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": bool(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        "callbacks": callbacks,
        "plugins": [io] if io is not None else [],
    }
    trainer = Trainer(strategy=strategy, **{**defaults, **settings})
    trainer.fit(module or Net(), loader(), ckpt_path=ckpt_path)
    return trainer


def saved(root: Path, strategy: Any | None = None, **settings: Any) -> Path:
    """Train and save a linked checkpoint at the end; return its path."""
    trainer = fit(root, strategy or paged(root / "pages"), io=linked(), **settings)
    path = root / "some.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy._close()
    return path


def manifest_of(path: Path) -> Manifest:
    return read_manifest(path)


def assert_same_tree(actual: Any, expected: Any, where: str = "") -> None:
    """Compare nested containers; tensors bit for bit, with dtype, shape and strides."""
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, where
        assert actual.shape == expected.shape, where
        assert actual.stride() == expected.stride(), where
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same_tree(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected), where
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same_tree(actual[index], value, f"{where}[{index}]")
    else:
        assert actual == expected, where


def end_of(trainer: Trainer) -> dict[str, Any]:
    """Return everything that training changed, as copies."""
    module = trainer.lightning_module
    return {
        "weights": {name: t.detach().clone() for name, t in module.state_dict().items()},
        "state": [
            {
                i: {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries.items()}
                for i, entries in optimizer.state_dict()["state"].items()
            }
            for optimizer in trainer.optimizers
        ],
    }
