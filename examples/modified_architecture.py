"""A Hugging Face model changed in place: another MLP and a gate in every layer of a Llama.

Run: python examples/modified_architecture.py [--fast]
"""

import argparse

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt


class GatedMLP(nn.Module):
    """An MLP of another shape, which starts as if it were not there."""

    def __init__(self, width: int) -> None:
        """Build it."""
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the stream, `[batch, sequence, width]`."""
        return self.gate.tanh() * self.down(self.up(x).relu().square())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a model that trains in a second")
    fast = parser.parse_args().fast
    width, depth = (32, 2) if fast else (512, 12)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # the units are the layers still, whatever is in them
        layer.mlp = GatedMLP(width)
    data = mt.TextDataModule(tokenizer="bytes", sequence_length=32 if fast else 256)
    strategy = mt.MegaTrainStrategy(max_ram_gb=0.25)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=3 if fast else 100,
        limit_val_batches=2,
        callbacks=[mt.PagingMonitor()],
        **quiet,
    )
    trainer.fit(mt.CausalLMModule(model, learning_rate=1e-3), datamodule=data)
