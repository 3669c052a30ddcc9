"""Precision of paged training; clipping goes to where the gradients are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from typing_extensions import override

from mt_lightning.engine.engine import Engine
from mt_lightning.errors import ConfigError
from mt_lightning.plugins.throughput import tell_throughput
from mt_lightning.tiers.ledger import COMPUTE
from mt_lightning.tiers.spans import Span

SUPPORTED = ("32-true", "bf16-mixed", "bf16-true")
_HALF = "bf16-true"
_FLOAT16 = ("16-true", "16-mixed")


class MegaTrainPrecision(Precision):
    """Precision plugin of `strategy="megatrain"`.

    Args:
        precision: "32-true" (full fp32), "bf16-mixed" (fp32 weights, autocast to bf16) or
            "bf16-true" (bf16 weights and gradients; the optimizer steps fp32 masters of them).

    Raises:
        ConfigError: The precision is not supported.
    """

    def __init__(
        self, precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "32-true"
    ) -> None:
        super().__init__()
        if precision in _FLOAT16:
            raise ConfigError(
                f"precision={precision!r} is not supported by strategy='megatrain': float16 ends "
                "at 65504 and loses small gradients without a loss scaler. Use 'bf16-true', of the "
                "same size, or 'bf16-mixed'."
            )
        if precision not in SUPPORTED:
            raise ConfigError(
                f"precision={precision!r} is not supported by strategy='megatrain' in this "
                f"version; "
                f"use Trainer(precision=...) with one of {', '.join(map(repr, SUPPORTED))}."
            )
        self.precision = precision
        self._engine: Engine | None = None

    @classmethod
    def from_plugin(cls, plugin: Precision | None) -> MegaTrainPrecision:
        """Translate the plugin that Lightning's connector chose; its own would not clip.

        Raises:
            ConfigError: The plugin has no counterpart.
        """
        if plugin is None:
            return cls()
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, MixedPrecision, HalfPrecision):
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise ConfigError(
            f"precision plugin {type(plugin).__name__} (precision={plugin.precision!r}) is not "
            f"supported "
            f"by strategy='megatrain' in this version; use one of "
            f"{', '.join(map(repr, SUPPORTED))}."
        )

    def attach(self, engine: Engine | None) -> None:
        """Send clipping to `engine` from now on."""
        self._engine = engine

    @property
    def keeps_masters(self) -> bool:
        """Whether weights are the upper halves of fp32 masters."""
        return self.precision == _HALF

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast floating point inputs to the dtype of the weights, as Lightning does."""
        if not self.keeps_masters:
            return data
        return apply_to_collection(data, torch.Tensor, _as_bfloat16)

    @override
    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Tell a ThroughputMonitor the dtype of matrix products."""
        if self.precision != "32-true":
            tell_throughput(model.trainer, torch.bfloat16)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:  # type: ignore[override]
        """Autocast for bf16-mixed; its cache is off as in Lightning, it would hold every weight.

        The default dtype stays what it is: all threads share it, and updates run meanwhile.
        """
        if self.precision != "bf16-mixed":
            yield
        else:
            engine = self._engine
            kind = "cpu" if engine is None else engine.machine.link.device.type
            with torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False):
                yield

    @override
    @contextmanager
    def train_step_context(self) -> Iterator[None]:  # type: ignore[override]
        """Charge what `training_step` does to the model."""
        with Span("training step", account=COMPUTE), super().train_step_context():
            yield

    @override
    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Charge backward to the model."""
        with Span("backward", account=COMPUTE):
            super().backward(tensor, *args, **kwargs)

    @override
    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        """Clamp gradients in the update."""
        engine, index = self._place(optimizer)
        engine.live.clip_value(index, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Scale gradients in the update so that their total norm is at most `clip_val`."""
        engine, index = self._place(optimizer)
        engine.live.clip_norm(index, clip_val)

    def _place(self, optimizer: Any) -> tuple[Engine, int]:
        assert self._engine is not None, "clipping outside of fit"
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        trained = [t.optimizer for t in self._engine.live.run.steps.trained]
        return self._engine, next(i for i, candidate in enumerate(trained) if candidate is inner)


def _as_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor
