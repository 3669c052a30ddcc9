"""Export a model in every way, with marks around each: for test_export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mt_lightning import CausalLMModule, MegaTrainStrategy
from mt_lightning.cli import main

from .measure import mark, report


def build(hidden_size: int, num_layers: int) -> CausalLMModule:
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return CausalLMModule(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01))


class SaveInFit(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, CausalLMModule)
        mark("in fit")
        pl_module.save_pretrained(self.folder / "in_fit", max_shard_size="100MB")
        mark("in fit done")


def fit(folder: Path, module: CausalLMModule) -> Trainer:
    trainer = Trainer(
        strategy=MegaTrainStrategy(offload_dir=str(folder / "run"), max_ram_gb=0.2),
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[SaveInFit(folder)],
    )
    rows = [{"input_ids": torch.arange(8)}]
    trainer.fit(module, DataLoader(rows), DataLoader(rows))  # pyright: ignore
    return trainer


def export(*words: object) -> None:
    assert main(["export", *map(str, words), "--max-shard-size", "100MB"]) == 0


def run(folder: Path, hidden_size: int, num_layers: int) -> None:
    warm = folder / "warm"  # everything is imported and every allocator warm before the marks
    warm.mkdir()
    small = build(64, 1)
    trainer = fit(warm, small)
    trainer.save_checkpoint(warm / "a.ckpt")
    trainer.strategy._close()  # pyright: ignore
    export(warm / "run", warm / "out")
    export(warm / "a.ckpt", warm / "out2")

    module = build(hidden_size, num_layers)
    trainer = fit(folder, module)
    mark("parked")
    module.save_pretrained(folder / "parked", max_shard_size="100MB")
    mark("parked done")
    trainer.save_checkpoint(folder / "a.ckpt")
    expected = {name: float(p.double().sum()) for name, p in module.model.named_parameters()}
    nbytes = sum(param.nbytes for param in module.parameters())
    trainer.strategy._close()  # pyright: ignore
    mark("run")
    export(folder / "run", folder / "from_run")
    mark("run done")
    mark("checkpoint")
    export(folder / "a.ckpt", folder / "from_ckpt")
    mark("checkpoint done")
    for name in ("in_fit", "parked", "from_run", "from_ckpt"):
        loaded = AutoModelForCausalLM.from_pretrained(folder / name)
        sums = {n: float(p.double().sum()) for n, p in loaded.named_parameters()}
        assert sums == expected, name
    report(nbytes=nbytes)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
