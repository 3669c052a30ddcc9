"""Fine-tune a Hugging Face model on a text, and let it write.

Run: python examples/huggingface_model.py [--fast] [--model NAME_OR_PATH] [--text FILE]

The default model, smollm2, needs: pip install 'mt-lightning[examples]'
"""

from __future__ import annotations

import argparse

from lightning.pytorch import Trainer, seed_everything
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt
from mt_lightning.callbacks import PagingProgressBar


def main() -> None:
    """Train for a few steps and generate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a tiny model with random weights")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default=None, help="a text file; default: Shakespeare")
    options = parser.parse_args()

    seed_everything(0)
    if options.fast:
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        model, tokenizer = LlamaForCausalLM(config), "bytes"
    else:
        model, tokenizer = options.model, options.model
    module = mt.CausalLMModule(
        model, learning_rate=5e-5, warmup_steps=2, scheduler="cosine", weight_decay=0.01
    )
    data = mt.TextDataModule(
        options.text, tokenizer=tokenizer, sequence_length=32 if options.fast else 256
    )
    trainer = Trainer(
        strategy=mt.MegaTrainStrategy(max_ram_gb=0.5),
        accelerator="cpu",
        max_steps=5 if options.fast else 30,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        callbacks=[mt.PagingMonitor(), PagingProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)

    # After fit the model is parked: its weights are mapped from disk and can be used as they are.
    prompt = data.tokenizer("HAMLET.\nTo be,", return_tensors="pt", return_token_type_ids=False)
    output = module.model.generate(**prompt, max_new_tokens=8 if options.fast else 40)
    print(data.tokenizer.decode(output[0]))


if __name__ == "__main__":
    main()
