"""A loss of one's own: label smoothing, and a penalty on large logits.

Run: python examples/custom_loss.py [--fast]
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import mt_lightning as mt


class Net(LightningModule):
    """Layers over a table of 64 symbols; only `loss` is out of the ordinary."""

    def __init__(self, width: int, depth: int) -> None:
        """Build it, as always."""
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(width, 64)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Any function of tensors will do; autograd sees an ordinary graph."""
        smooth = functional.cross_entropy(logits, target, label_smoothing=0.1)
        return smooth + 1e-4 * logits.logsumexp(-1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Learn to count."""
        x = self.embedding(batch)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.head(x), (batch + 1) % 64)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return any optimizer of torch."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a model that trains in a second")
    fast = parser.parse_args().fast
    strategy = mt.MegaTrainStrategy(max_ram_gb=0.25)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    show = [mt.PagingMonitor()]
    steps = 3 if fast else 300
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_steps=steps, callbacks=show, **quiet
    )
    data = DataLoader(torch.arange(64).repeat(64), batch_size=32, shuffle=True)
    trainer.fit(Net(16, 2) if fast else Net(512, 12), data)
