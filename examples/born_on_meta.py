"""A model bigger than memory: built on meta, born page by page, trained from random weights.

Run: python examples/born_on_meta.py [--fast] [--max-ram-gb 1.0]

Without --fast it has 1.26 billion parameters: 5 GB of weights, 20 GB with gradients and AdamW
state, and 30 GB on disk (every page has two slots). The process stays below 3 GiB, and the hash of
the trained parameters is the same under every budget.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt
from mt_lightning.callbacks import PagingProgressBar


class LargeModel(LightningModule):
    """A Llama whose weights are made by the strategy."""

    def __init__(self, config: LlamaConfig) -> None:
        """Keep the config; no weight is made here."""
        super().__init__()
        self.config = config
        self.model: LlamaForCausalLM | None = None

    def configure_model(self) -> None:
        """Describe the model without memory; Lightning calls this before the strategy's setup."""
        if self.model is None:
            with torch.device("meta"):
                self.model = LlamaForCausalLM(self.config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the next-token loss."""
        assert self.model is not None
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; its state is made in pages too."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Train for three steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a model that trains in a second")
    parser.add_argument("--max-ram-gb", type=float, default=1.0, help="budget (default: 1.0)")
    options = parser.parse_args()
    fast = options.fast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512 if fast else 32000,
        hidden_size=32 if fast else 2048,
        intermediate_size=64 if fast else 5632,
        num_hidden_layers=2 if fast else 22,
        num_attention_heads=2 if fast else 16,
        num_key_value_heads=2 if fast else 16,
    )
    tokens = torch.randint(config.vocab_size, (8, 32))
    trainer = Trainer(
        strategy=mt.MegaTrainStrategy(max_ram_gb=options.max_ram_gb),
        accelerator="cpu",
        max_steps=3,
        callbacks=[mt.PagingMonitor(), PagingProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = LargeModel(config)
    trainer.fit(model, DataLoader(tokens, batch_size=1))
    print(f"sha256 of the {count_parameters(model):,} parameters: {hash_parameters(model)}")


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(param.numel() for param in model.parameters())


def hash_parameters(model: torch.nn.Module) -> str:
    """Return the sha256 of all parameters, one after the other; they are read from disk."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().contiguous().numpy())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
