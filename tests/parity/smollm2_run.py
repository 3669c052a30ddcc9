"""A script: fine-tune SmolLM2-135M, plainly or paged, or measure its live activations.

python -m tests.parity.smollm2_run paged --model DIRECTORY --steps 20 --directory RUN
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from ..memory.measure import mark, report

warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated.*")
warnings.filterwarnings("ignore", ".*gradient_checkpointing_enable.* is deprecated.*")

NUM_TOKENS = 128
VOCAB_SIZE = 49152


class FineTuning(LightningModule):
    """Ordinary fine-tuning of a causal language model."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.network = load(directory)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=batch, labels=batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.network.parameters(), lr=5e-5, weight_decay=0.01)


class Phases(Callback):
    """Marks the steps and keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[str] = []

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


def load(directory: str) -> torch.nn.Module:
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return network.train()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=generator) for _ in range(count)]


def train(arguments: argparse.Namespace) -> None:
    settings: dict[str, Any] = {}
    module = FineTuning(arguments.model)
    if arguments.mode == "paged":
        from mt_lightning import MegaTrainStrategy

        settings["strategy"] = MegaTrainStrategy(
            offload_dir=arguments.directory, max_ram_gb=arguments.max_ram_gb
        )
    else:
        module.network.gradient_checkpointing_enable()
    phases = Phases()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=arguments.directory,
        callbacks=[phases],
        **settings,
    )
    trainer.fit(module, DataLoader(batches(arguments.steps), batch_size=None))
    mark("parked")
    digest, num_parameters = hashlib.sha256(), 0
    for name, parameter in sorted(module.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().numpy())
        num_parameters += parameter.numel()
    paging: dict[str, Any] = {}
    if arguments.mode == "paged":
        paging = trainer.strategy.engine.stats.snapshot()
    report(
        sha256=digest.hexdigest(),
        losses=phases.losses,
        num_parameters=num_parameters,
        paging=paging,
    )


def hold_activations(arguments: argparse.Namespace) -> None:
    """Run forward and backward over frozen, mapped weights: what grows is activations alone."""
    network = load(arguments.model).requires_grad_(False)
    network.gradient_checkpointing_enable()
    network.enable_input_require_grads()
    for index, batch in enumerate(batches(arguments.steps)):
        mark(f"step{index + 1}")
        network(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    mark("trained")
    report()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("plain", "paged", "activations"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-ram-gb", type=float, default=0.5)
    parser.add_argument("--directory", required=True)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(0)
    if arguments.mode == "paged":
        import mt_lightning  # noqa: F401  (part of the base)
    mark("imported")
    if arguments.mode == "activations":
        hold_activations(arguments)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
