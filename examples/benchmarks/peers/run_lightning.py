"""Plain Lightning, and Lightning with strategy="megatrain", on the common workload."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from workload import LEARNING_RATE, Meter, arguments, batches, build_model


class Module(LightningModule):
    """The common model; built inside of `configure_model`, so that no copy is left behind."""

    def __init__(self, build: Callable[[], torch.nn.Module], *, checkpointing: bool) -> None:
        super().__init__()
        self._build = build
        self._checkpointing = checkpointing
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model."""
        if self.model is None:
            self.model = self._build()
            if self._checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of tokens `[batch, length]`."""
        del batch_idx
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)


class Ends(Callback):
    """Hands the end of every step to the meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Note a step."""
        self._meter.step_ended(float(outputs["loss"]))


def main() -> None:
    """Train and report."""
    name = sys.argv.pop(1)
    args = arguments(__doc__)
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    options: dict[str, Any] = {}
    if name == "megatrain":
        import mt_lightning as mt

        compression: Any = {"False": False, "True": True}.get(args.compression, args.compression)
        options["strategy"] = mt.MegaTrainStrategy(
            args.directory, max_ram_gb=args.max_ram_gb, optimizer_compression=compression
        )
    meter = Meter()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=args.steps,
        default_root_dir=args.directory,
        callbacks=[Ends(meter)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Module(lambda: build_model(args), checkpointing=args.checkpointing and name == "plain")
    trainer.fit(module, DataLoader(list(batches(args)), batch_size=None))  # type: ignore[arg-type]
    meter.report()


if __name__ == "__main__":
    main()
