"""A LightningModule for any Hugging Face causal language model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.text import Perplexity
from transformers import PreTrainedModel

from mt_lightning.errors import ConfigError
from mt_lightning.export.shards import DEFAULT_SHARD_SIZE
from mt_lightning.huggingface.adapters import base_of, is_adapted, save_adapters
from mt_lightning.huggingface.batch_checks import (
    IGNORED_LABEL,
    check_labels,
    check_length,
    check_tokens,
    most_positions,
)
from mt_lightning.huggingface.data.proof import check_packed_data
from mt_lightning.huggingface.loading import load_model
from mt_lightning.huggingface.pretrained import save_model
from mt_lightning.huggingface.training_loss import TrainingLoss
from mt_lightning.losses.chunked import ChunkSize, chunk_tokens
from mt_lightning.resume.description import MODELS_KEY, describe_models

_INPUTS = ("input_ids", "attention_mask", "position_ids")
_PERPLEXITY_CHUNK_TOKENS = 64
_DEFAULT_LEARNING_RATE = 5e-5
_DEFAULT_WEIGHT_DECAY = 0.01
_DEFAULT_BETAS = (0.9, 0.999)

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
ScheduleName = Literal["constant", "cosine", "linear"]


class CausalLMModule(LightningModule):
    """Train and evaluate a causal language model on next-token prediction.

    A batch is a mapping with `input_ids` (int64 `[batch, sequence]`) and, if wanted,
    `attention_mask` or `position_ids`, and `labels`. Without `labels` the inputs are the labels.
    Logs `train_loss`; `val_loss` and `val_perplexity`; `test_loss` and `test_perplexity`.

    Args:
        model: a module that takes `input_ids` and `labels` and returns `.loss` and `.logits`,
            or a name or path for `load_model`.
        learning_rate: of the default AdamW; None means 5e-5.
        weight_decay: of the default AdamW, for parameters of two or more dimensions; None
            means 0.01. Norms and biases never decay.
        betas: of the default AdamW; None means (0.9, 0.999).
        optimizer: builds another optimizer from parameter groups, as
            `functools.partial(torch.optim.SGD, lr=0.1)` does. It holds its own settings, so
            the three above must stay None.
        warmup_steps: optimizer steps over which the learning rate rises from zero.
        scheduler: what the learning rate does after the warm-up: "constant", or "cosine" and
            "linear" to zero at the last step.
        loss_chunk_size: tokens whose logits exist at once in a training step: "auto" for as many
            as 32 MiB hold (256 MiB on an accelerator), None for all; see `chunked_loss`. Where the
            model needs its logits for something else, it computes them all, and a log line says so.
        dtype: dtype of weights loaded by name.
        cache_dir: where a converted copy is kept; see `cache_directory`.

    Raises:
        ConfigError: if a setting is out of range or contradicts another.
    """

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str],
        *,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] | None = None,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 0,
        scheduler: ScheduleName = "constant",
        loss_chunk_size: ChunkSize | None = "auto",
        dtype: torch.dtype | str = torch.float32,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        own_settings = (learning_rate, weight_decay, betas)
        if optimizer is not None and any(value is not None for value in own_settings):
            raise ConfigError(
                "CausalLMModule got an optimizer and learning_rate, weight_decay or betas: they "
                "would be ignored. Set them in the optimizer (lr=, weight_decay=, betas=)."
            )
        if scheduler not in ("constant", "cosine", "linear"):
            raise ConfigError(
                f"scheduler={scheduler!r} is unknown; set it to 'constant', 'cosine' or 'linear'."
            )
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps={warmup_steps} is negative; set it to 0 or more.")
        if loss_chunk_size is not None:
            chunk_tokens(loss_chunk_size, 1, torch.device("cpu"))  # refuses what it cannot be
        saved = ["learning_rate", "weight_decay", "betas", "warmup_steps", "scheduler"]
        saved.append("loss_chunk_size")
        self.save_hyperparameters(*saved, *(["model"] if isinstance(model, str) else []))
        self.learning_rate = _DEFAULT_LEARNING_RATE if learning_rate is None else learning_rate
        self.weight_decay = _DEFAULT_WEIGHT_DECAY if weight_decay is None else weight_decay
        self.betas = _DEFAULT_BETAS if betas is None else tuple(betas)
        self.warmup_steps = warmup_steps
        self.scheduler: ScheduleName = scheduler
        self._optimizer_factory = optimizer
        self._training_loss = TrainingLoss(loss_chunk_size)
        self.model: nn.Module = (
            model
            if isinstance(model, nn.Module)
            # transformers loads in evaluation mode, and Lightning keeps the mode it finds.
            else load_model(model, dtype=dtype, cache_dir=cache_dir).train()
        )
        self.val_perplexity = Perplexity(ignore_index=IGNORED_LABEL)
        self.test_perplexity = Perplexity(ignore_index=IGNORED_LABEL)

    def forward(self, **inputs: Any) -> Any:
        """Run the model; the inputs are those of its own `forward`."""
        return self.model(**inputs)

    def on_train_start(self) -> None:
        """Prove that samples of packed rows do not see each other, if the data are packed."""
        check_packed_data(self.trainer, self.model)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean next-token loss of the batch."""
        check_labels(batch)
        loss = self._training_loss(self.model, partial(self._run, batch))
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start the metric anew: sums left by another inference mode cannot be added to."""
        self.val_perplexity.reset()

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Log `val_loss` and `val_perplexity`."""
        return self._evaluate(batch, "val", self.val_perplexity)

    def on_test_epoch_start(self) -> None:
        """Start the metric anew; see `on_validation_epoch_start`."""
        self.test_perplexity.reset()

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Log `test_loss` and `test_perplexity`."""
        return self._evaluate(batch, "test", self.test_perplexity)

    def configure_optimizers(self) -> Any:
        """Build the optimizer over decaying and not decaying parameters, and its schedule."""
        optimizer = self._build_optimizer()
        if self.scheduler == "constant" and self.warmup_steps == 0:
            return optimizer
        num_steps = math.inf
        if self.scheduler != "constant":
            num_steps = self.trainer.estimated_stepping_batches
            if not math.isfinite(num_steps):
                raise ConfigError(
                    f"scheduler={self.scheduler!r} needs the number of steps, but the Trainer has "
                    "no end; set Trainer(max_steps=...) or max_epochs."
                )
        factor = partial(learning_rate_factor, self.scheduler, self.warmup_steps, num_steps)
        schedule = {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the model's config down, so that `megatrain export` need not be told."""
        checkpoint[MODELS_KEY] = describe_models(self)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        safe_serialization: bool = True,
    ) -> None:
        """Save the model for `from_pretrained`, at any time, in a fit too.

        Weights that are in pages are read from their files piece by piece; no copy is in RAM. Of
        a model of PEFT the adapters are saved, for `PeftModel.from_pretrained`.

        Args:
            save_directory: where to; made if it is not there. Weights that an earlier save left
                there are replaced.
            max_shard_size: the most bytes of tensors in one file, as a number or as "5GB".
            safe_serialization: True: safetensors is the only format.

        Raises:
            ConfigError: if the model is not one of transformers, or a setting is wrong.
            StorageError: if something cannot be read or written.
        """
        if safe_serialization is not True:
            raise ConfigError(
                f"safe_serialization={safe_serialization!r}: only safetensors is written; leave "
                "it True."
            )
        if is_adapted(self.model):
            save_adapters(self.model, Path(save_directory))
            return
        if not isinstance(self.model, PreTrainedModel):
            raise ConfigError(
                f"the model is a {type(self.model).__name__}, which is no model of transformers. "
                "Save a checkpoint, and export it with OUT ending in .safetensors."
            )
        save_model(self.model, Path(save_directory), max_shard_size=max_shard_size)

    def _build_optimizer(self) -> Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        decaying: dict[str, Any] = {"params": [p for p in trainable if p.dim() >= 2]}
        plain = {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0}
        groups = [group for group in (decaying, plain) if group["params"]]
        if self._optimizer_factory is not None:
            try:
                return self._optimizer_factory(groups)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"The optimizer refused its settings: {error}. Change them in the optimizer "
                    "(optimizer.lr=..., optimizer.weight_decay=... on the command line)."
                ) from error
        return torch.optim.AdamW(
            groups,
            lr=self.learning_rate,
            betas=(self.betas[0], self.betas[1]),
            weight_decay=self.weight_decay,
        )

    def _run(self, batch: Mapping[str, Tensor]) -> Any:
        check_length(
            batch["input_ids"].shape[-1],
            most_positions(base_of(self.model)),
            "Set data.sequence_length to that, or cut the samples.",
        )
        check_tokens(batch, base_of(self.model))
        inputs = {key: batch[key] for key in _INPUTS if key in batch}
        return self.model(**inputs, labels=_labels(batch), use_cache=False)

    def _evaluate(self, batch: Mapping[str, Tensor], stage: str, perplexity: Perplexity) -> Tensor:
        output = self._run(batch)
        update_perplexity(perplexity, output.logits, _labels(batch))
        num_samples = len(batch["input_ids"])
        self.log(f"{stage}_loss", output.loss, prog_bar=True, batch_size=num_samples)
        self.log(f"{stage}_perplexity", perplexity, prog_bar=True, batch_size=num_samples)
        return output.loss


def learning_rate_factor(
    scheduler: ScheduleName, warmup_steps: int, num_steps: float, step: int
) -> float:
    """Return what the base learning rate is multiplied with at a step.

    Args:
        scheduler: "constant", "cosine" or "linear".
        warmup_steps: steps of linear rise from zero.
        num_steps: steps of the whole run, at which "cosine" and "linear" reach zero.
        step: number of steps done.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if scheduler == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1.0, num_steps - warmup_steps))
    return 1.0 - done if scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def update_perplexity(perplexity: Perplexity, logits: Tensor, labels: Tensor) -> None:
    """Feed next-token logits to the metric in slices of the sequence.

    The metric takes a softmax of what it is given: slices keep that copy small.

    Args:
        perplexity: the metric, which ignores the label -100.
        logits: `[batch, sequence, vocabulary]`, any float dtype.
        labels: int64 `[batch, sequence]`, not shifted.
    """
    num_predictions = labels.shape[1] - 1
    for start in range(0, num_predictions, _PERPLEXITY_CHUNK_TOKENS):
        stop = min(start + _PERPLEXITY_CHUNK_TOKENS, num_predictions)
        perplexity.update(logits[:, start:stop].float(), labels[:, start + 1 : stop + 1])


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    if "labels" in batch:
        return batch["labels"]
    if "attention_mask" in batch:
        return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
    return batch["input_ids"]
