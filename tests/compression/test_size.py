"""How many bits the optimizer state of a real model takes, counted from files."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from mt_lightning import MegaTrainStrategy


class SmolLM2(LightningModule):
    """The shape of SmolLM2-135M; what its weights are does not change a size."""

    def configure_model(self) -> None:
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        with torch.device("meta"):
            self.network = LlamaForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_a_whole_smollm2_takes_at_most_three_and_a_half_bits_per_value(tmp_path: Path) -> None:
    strategy = MegaTrainStrategy(offload_dir=tmp_path, max_ram_gb=0.5, optimizer_compression=True)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = SmolLM2()
    trainer.fit(net, DataLoader(torch.randint(49152, (1, 8)), batch_size=1))
    num_values = 2 * sum(param.numel() for param in net.parameters())
    assert num_values > 2 * 134e6
    slots = [
        sum(path.stat().st_size for path in tmp_path.glob(f"pages/p*.state.{slot}"))
        for slot in (0, 1)
    ]
    for num_bytes in slots:
        assert num_bytes > 0
        assert 8 * num_bytes / num_values <= 3.5
