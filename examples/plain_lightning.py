"""An ordinary LightningModule: only the Trainer's strategy is new.

Run: python examples/plain_lightning.py [--fast]
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import mt_lightning as mt
from mt_lightning.callbacks import PagingProgressBar

VOCABULARY = 128


class SumModel(LightningModule):
    """A small transformer that learns to continue arithmetic sequences modulo 128."""

    def __init__(self, width: int, num_layers: int) -> None:
        """Build the network, as always."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, sequence, vocabulary]`."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the next-token loss."""
        logits = self(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return any optimizer of torch."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a model that trains in a second")
    fast = parser.parse_args().fast

    torch.manual_seed(0)
    start, stride = torch.randint(VOCABULARY, (2, 256, 1))
    sequences = (start + stride * torch.arange(33)) % VOCABULARY
    model = SumModel(width=32 if fast else 512, num_layers=2 if fast else 12)
    trainer = Trainer(
        strategy=mt.MegaTrainStrategy(max_ram_gb=0.25),
        accelerator="cpu",
        max_steps=5 if fast else 100,
        callbacks=[mt.PagingMonitor(), PagingProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(sequences, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
