"""A script: train a Llama that is born on meta, a few steps, and say what became of it.

Run by the tests of depth and of size, and by hand:

    python -m tests.memory.llama_run --hidden 2048 --intermediate 5632 --layers 22 --vocab 32000 \
        --steps 3 --max-ram-gb 1.5 --directory /mnt/nvme/run
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from .measure import mark, report

warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*")


class BornOnMeta(LightningModule):
    """A Llama whose weights exist nowhere until the strategy gives them a place."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.network = LlamaForCausalLM(self.config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.network.parameters(), lr=1e-4)


class Phases(Callback):
    """Marks the steps, and hashes every parameter before the first and after the last."""

    def __init__(self, hashes: bool) -> None:
        self.hashes = hashes
        self.before: dict[str, str] = {}
        self.losses: list[str] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mark("attached")
        if self.hashes:
            self.before = hash_parameters(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        mark(f"step{batch_idx + 1}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item().hex())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mark("trained")


def hash_parameters(module: nn.Module) -> dict[str, str]:
    """Return the sha256 of every tensor of the state dict."""
    return {
        name: hashlib.sha256(tensor.contiguous().numpy()).hexdigest()
        for name, tensor in module.state_dict().items()
    }


def all_finite(module: nn.Module) -> bool:
    """Look at every element, a few million at a time."""
    return all(
        bool(torch.isfinite(part).all())
        for tensor in module.state_dict().values()
        for part in tensor.flatten().split(1 << 22)
    )


def main() -> None:
    from mt_lightning import MegaTrainStrategy

    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--intermediate", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-ram-gb", type=float, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--hashes", action="store_true")
    arguments = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(3, verbose=False)
    mark("imported")
    config = LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=256,
    )
    module = BornOnMeta(config)
    generator = torch.Generator().manual_seed(4)
    batches = [
        torch.randint(arguments.vocab, (1, arguments.tokens), generator=generator)
        for _ in range(arguments.steps)
    ]
    phases = Phases(arguments.hashes)
    trainer = Trainer(
        accelerator="cpu",
        strategy=MegaTrainStrategy(
            offload_dir=arguments.directory, max_ram_gb=arguments.max_ram_gb
        ),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=arguments.directory,
        callbacks=[phases],
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    mark("parked")
    values: dict[str, Any] = {}
    if arguments.hashes:
        after = hash_parameters(module)
        values["hashes"] = after
        values["unchanged"] = [name for name in after if after[name] == phases.before[name]]
        values["all_finite"] = all_finite(module)
    plan, stats = trainer.strategy.engine.plan, trainer.strategy.engine.stats
    report(
        losses=phases.losses,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        weight_bytes=plan.weight_bytes,
        state_bytes=plan.state_bytes,
        ram_peak_bytes=stats.ram_peak_bytes,
        evictions=stats.evictions,
        reloads=stats.reloads,
        **values,
    )


if __name__ == "__main__":
    main()
