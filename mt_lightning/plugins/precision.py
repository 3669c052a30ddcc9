"""Precision of paged training; clipping goes to where the gradients are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from typing_extensions import override

from mt_lightning.engine.engine import Engine
from mt_lightning.errors import ConfigError
from mt_lightning.plugins.loss_scale import LossScale
from mt_lightning.plugins.throughput import tell_throughput
from mt_lightning.tiers.ledger import COMPUTE
from mt_lightning.tiers.spans import Span

SUPPORTED = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
_HALF = "bf16-true"
_COMPUTED_IN = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PLAIN = MixedPrecision.__qualname__
"""Where Lightning's own plugin keeps the state of its scaler in a checkpoint."""


class MegaTrainPrecision(Precision):
    """Precision plugin of `strategy="megatrain"`.

    Args:
        precision: "32-true" (full fp32), "bf16-mixed" (fp32 weights, autocast to bf16), "16-mixed"
            (fp32 weights, autocast to fp16, scaled losses) or "bf16-true" (bf16 weights and
            gradients; the optimizer steps fp32 masters of them).
        scaler: Scales losses in "16-mixed"; None: `torch.amp.GradScaler` for the device.

    Raises:
        ConfigError: The precision is not supported.
    """

    def __init__(
        self,
        precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"] = "32-true",
        scaler: torch.amp.GradScaler | None = None,  # pyright: ignore[reportPrivateImportUsage]
    ) -> None:
        super().__init__()
        if precision == "16-true":
            raise ConfigError(
                "precision='16-true' is not supported by strategy='megatrain': weights of float16 "
                "lose small updates, and end at 65504. Use 'bf16-true', of the same size, "
                "'bf16-mixed' or '16-mixed'."
            )
        if precision not in SUPPORTED:
            raise ConfigError(
                f"precision={precision!r} is not supported by strategy='megatrain' in this "
                f"version; "
                f"use Trainer(precision=...) with one of {', '.join(map(repr, SUPPORTED))}."
            )
        if scaler is not None and precision != "16-mixed":
            raise ConfigError(f"precision={precision!r} has no use for a scaler: give '16-mixed'.")
        self.precision = precision
        self.scales = precision == "16-mixed"
        """Whether losses are scaled."""
        self._given = LossScale(scaler) if scaler is not None else None
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
        if type(plugin) is MixedPrecision:
            return cls(plugin.precision, plugin.scaler)  # type: ignore[arg-type]
        if type(plugin) in (Precision, HalfPrecision):
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
            tell_throughput(model.trainer, _COMPUTED_IN.get(self.precision, torch.bfloat16))
        return super().connect(model, optimizers, lr_schedulers)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:  # type: ignore[override]
        """Autocast for the mixed ones; its cache is off as in Lightning: it would hold all weights.

        The default dtype stays what it is: all threads share it, and updates run meanwhile.
        """
        dtype = _COMPUTED_IN.get(self.precision)
        if dtype is None:
            yield
        else:
            with torch.autocast(self._device_type, dtype=dtype, cache_enabled=False):
                yield

    @property
    def _device_type(self) -> str:
        return "cpu" if self._engine is None else self._engine.machine.link.device.type

    # -- scaled losses ----------------------------------------------------------------------------

    @property
    def _scale(self) -> LossScale | None:
        """What scales losses, made for the device once it is known."""
        if self.scales and self._given is None:
            self._given = LossScale(torch.amp.GradScaler(self._device_type))  # pyright: ignore[reportPrivateImportUsage]
        return self._given

    @override
    def pre_backward(self, tensor: torch.Tensor, module: pl.LightningModule) -> torch.Tensor:  # type: ignore[override]
        """Scale the loss of 16-mixed."""
        if self._scale is not None:
            tensor = self._scale.scale(tensor)
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Step; in 16-mixed not where a gradient is infinite or NaN."""
        if self._scale is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:
            self._after_closure(model, optimizer)  # backward was skipped
            return result
        engine, index = self._place(optimizer)
        prepare = partial(self._after_closure, model, optimizer)
        return self._scale.step(engine, index, prepare, partial(optimizer.step, **kwargs))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return that of the scaler, empty where there is none."""
        return {} if self._scale is None else self._scale.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load that of the scaler."""
        if self._scale is not None:
            self._scale.scaler.load_state_dict(state_dict)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let plain Lightning find the state of the scaler too."""
        if self._scale is not None:
            checkpoint[_PLAIN] = self.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the scaler of plain Lightning's own plugin."""
        if checkpoint.get(_PLAIN):
            self.load_state_dict(checkpoint[_PLAIN])

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
