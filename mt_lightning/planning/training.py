"""What is to be trained, as far as bytes and time depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mt_lightning.engine.options import Options
from mt_lightning.errors import ConfigError

PRECISIONS = {
    "32-true": "float32",
    "bf16-mixed": "bfloat16",
    "bf16-true": "bfloat16",
    "16-mixed": "bfloat16",  # a float16 product takes as long
}
"""Precisions, and the dtype that matrix products take in each."""

_MOST_TOKENS = 10**12
"""Of a step; with more, bytes of activations do not fit the integers that shapes have."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a run; every error names the field.

    Attributes:
        batch_size: Sequences of a micro-batch.
        sequence_length: Tokens of a sequence.
        accumulate_grad_batches: Micro-batches of a step.
        precision: One of `PRECISIONS`.
        optimizer: One of `OPTIMIZERS`.
        clips_norm: Whether gradients are clipped by their norm: updates then wait for all of them.
        num_checkpoints: Linked checkpoints that are kept beside the run.
        options: What the strategy is given.
    """

    batch_size: int = 1
    sequence_length: int = 2048
    accumulate_grad_batches: int = 1
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    clips_norm: bool = False
    num_checkpoints: int = 0
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("batch_size", "sequence_length", "accumulate_grad_batches"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r}: give a whole number above 0.")
        if self.tokens_per_step > _MOST_TOKENS:
            raise ConfigError(
                f"a step of {self.tokens_per_step:.3g} tokens: at most {_MOST_TOKENS:.0e} can be "
                "planned. Lower batch_size, sequence_length or accumulate_grad_batches."
            )
        if type(self.num_checkpoints) is not int or self.num_checkpoints < 0:
            raise ConfigError(f"num_checkpoints={self.num_checkpoints!r}: give 0 or more.")
        for name, allowed in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ConfigError(f"{name}={getattr(self, name)!r}: choose one of {choices}.")
        options = self.options
        if options.layer_major is True and options.recompute is False:
            raise ConfigError(
                "layer_major=True and recompute=False contradict each other: what the units of all "
                "batches of a step save would have to be kept. Set recompute='auto'."
            )
        if options.layer_major is True and self.accumulate_grad_batches == 1:
            raise ConfigError(
                "layer_major=True needs batches to run unit by unit: set accumulate_grad_batches "
                "above 1, or layer_major='auto'."
            )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch_size * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.tokens * self.accumulate_grad_batches

    @property
    def dtype(self) -> str:
        """The dtype of matrix products."""
        return PRECISIONS[self.precision]

    @property
    def keeps_masters(self) -> bool:
        """Whether weights are the bfloat16 halves of fp32 masters."""
        return self.precision == "bf16-true"

    @property
    def schedule(self) -> str:
        """What updates can be, as the strategy finds it."""
        looks = self.options.nonfinite != "propagate" or self.precision == "16-mixed"
        waits = self.clips_norm or looks
        return "deferred" if waits else "eager"

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer over all of a model that is trained."""
        params: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if not params:
            raise ConfigError("the model has no parameter that is trained.")
        return OPTIMIZERS[self.optimizer](params)
