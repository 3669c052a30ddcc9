"""Train a stack of layers on long batches; run by `run_measured`."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.memory.measure import mark, report

WIDTH = 256
ROWS = 1024
INPUT_BYTES = ROWS * WIDTH * 4


class Stack(LightningModule):
    """What its units compute inside is little more than what they receive."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def training_step(self, seed: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        x = torch.randn(ROWS, WIDTH, generator=generator)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            mark("training")

    def on_train_end(self) -> None:
        mark("trained")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main() -> None:
    from mt_lightning import MegaTrainStrategy
    from mt_lightning.layer_major import loop

    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--max-ram-gb", type=float, required=True)
    parser.add_argument("--directory", required=True)
    arguments = parser.parse_args()
    # By bytes, such small weights would be read again for each batch.
    loop.best_group = lambda num_micros, **_: num_micros
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    strategy = MegaTrainStrategy(
        offload_dir=arguments.directory,
        max_ram_gb=arguments.max_ram_gb,
        layer_major=True,
        durability="step",
    )
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=arguments.batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=arguments.directory,
    )
    trainer.fit(
        Stack(arguments.layers), DataLoader(torch.arange(2 * arguments.batches), batch_size=1)
    )
    report(**strategy.engine.stats.snapshot())


if __name__ == "__main__":
    main()
