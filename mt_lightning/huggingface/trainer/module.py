"""The LightningModule that a Trainer makes of a model and of TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer as HuggingFaceTrainer
from transformers import TrainingArguments, get_scheduler

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.data.proof import check_packed_data
from mt_lightning.huggingface.trainer.data import NUM_ITEMS
from mt_lightning.huggingface.trainer.loss import BatchLoss, LossSum
from mt_lightning.huggingface.trainer.predictions import Reader
from mt_lightning.resume.description import MODELS_KEY, describe_models

Optimizers = tuple[Optimizer | None, LRScheduler | None]
OptimizerKind = tuple[type[Optimizer], dict[str, Any]]


class TrainerModule(LightningModule):
    """Steps of one model.

    Args:
        model: The model.
        args: Settings of optimizer, scheduler and loss.
        loss: Computes losses.
        reader: Takes predictions and labels from what the model gives.
        optimizers: Optimizer and scheduler of the user's own, None for those of `args`.
        optimizer_kind: Class and settings of the optimizer; None: those of `args`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        loss: BatchLoss,
        reader: Reader,
        optimizers: Optimizers = (None, None),
        optimizer_kind: OptimizerKind | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.args = args
        self.max_steps = 0
        """Optimizer steps of the run, for the scheduler."""
        self.num_unlogged_steps = 0
        """Finished steps whose losses are in `losses`."""
        self.keeps_predictions = False
        """Whether evaluation returns predictions, not the loss alone."""
        self.stops_epoch = False
        """Whether the next batch of this epoch is left out, and all that follow."""
        self.losses = LossSum(filters=args.logging_nan_inf_filter)
        self._loss = loss
        self._reader = reader
        self._given = optimizers
        self._optimizer_kind = optimizer_kind

    def on_train_start(self) -> None:
        """Prove that samples of packed rows do not see each other, if the data are packed."""
        check_packed_data(self.trainer, self.model)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """End the epoch where a callback asked for it."""
        return -1 if self.stops_epoch else None

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of a batch, times the number that Lightning divides it by."""
        inputs = dict(batch)
        num_items, num_batches = inputs.pop(NUM_ITEMS)
        loss = self._loss.loss(inputs, num_items)
        if not self._loss.scaled(num_items):
            loss = loss / num_batches
        self.losses.update(loss.detach(), self.num_unlogged_steps)
        return loss * self.trainer.accumulate_grad_batches

    def validation_step(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        """Return loss, predictions and labels of a batch."""
        return self._reader.read(self._loss, batch, keeps_predictions=self.keeps_predictions)

    def configure_optimizers(self) -> Any:
        """Build optimizer and scheduler as transformers does."""
        optimizer, scheduler = self._given
        if optimizer is None:
            optimizer = self._build_optimizer()
        if scheduler is None:
            scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=self.args.get_warmup_steps(self.max_steps),
                num_training_steps=self.max_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,  # pyright: ignore
            )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; transformers' own ones take nothing."""
        scheduler.step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the model's config down, so that `megatrain export` need not be told."""
        checkpoint[MODELS_KEY] = describe_models(self)

    def _build_optimizer(self) -> Optimizer:
        # Called on the class: which parameters decay is transformers' to say.
        find: Any = HuggingFaceTrainer.get_decay_parameter_names
        decaying = set(find(None, self.model))
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for name, p in named if name in decaying],
                "weight_decay": self.args.weight_decay,
            },
            {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
        ]
        if not named:
            raise ConfigError(
                f"no parameter of {type(self.model).__name__} is trained: set requires_grad=True "
                "for those that shall be."
            )
        kind, settings = self._optimizer_kind or HuggingFaceTrainer.get_optimizer_cls_and_kwargs(
            self.args,
            self.model,  # pyright: ignore[reportArgumentType]
        )
        try:
            return kind([group for group in groups if group["params"]], **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{kind.__name__} refused its settings: {error}. Change learning_rate, "
                "weight_decay, adam_beta1, adam_beta2, adam_epsilon or optim_args."
            ) from error

    @property
    def unlogged_loss(self) -> float:
        """The sum of losses since it was last taken."""
        return float(self.losses.total)

    def forget_losses(self) -> None:
        """Begin the sum anew."""
        with torch.inference_mode(False):
            self.losses.reset()
        self.num_unlogged_steps = 0
