"""What cannot run on paged parameters is refused at setup, by name and with the way out."""

from __future__ import annotations

import logging
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from mt_lightning.engine.engine import Engine
from mt_lightning.errors import ConfigError

log = logging.getLogger(__name__)

_CALLBACKS = {
    "StochasticWeightAveraging": "it keeps a second copy of all weights in RAM",
    "WeightAveraging": "it keeps a second copy of all weights in RAM",
    "EMAWeightAveraging": "it keeps a second copy of all weights in RAM",
    "ModelPruning": "it replaces parameters by masked copies",
}
_made_halves: WeakSet[torch.nn.Module] = WeakSet()
_WATCHED = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step")
_WATCHED_OF_MODULE = (*_WATCHED, "backward")


def refuse(trainer: pl.Trainer, checkpoint_io: CheckpointIO, engine: Engine | None) -> None:
    """Raise ConfigError when the trainer holds something that paging cannot serve."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    if engine is not None and fitting and engine.num_lost and trainer.global_step:
        _refuse_lost(trainer, engine.num_lost)
    for callback in getattr(trainer, "callbacks", []):
        for base in type(callback).__mro__:
            if base.__name__ in _CALLBACKS:
                raise ConfigError(
                    f"callback {type(callback).__name__} cannot run with strategy='megatrain': "
                    f"{_CALLBACKS[base.__name__]}. Remove it from Trainer(callbacks=[...])."
                )
    if any(base.__name__ == "AsyncCheckpointIO" for base in type(checkpoint_io).__mro__):
        raise ConfigError(
            "AsyncCheckpointIO cannot run with strategy='megatrain': it would read pages while "
            "training "
            "changes them. Remove it from Trainer(plugins=[...]); saving is streamed anyway."
        )
    if trainer.lightning_module._compiler_ctx is not None:
        raise ConfigError(
            "torch.compile(module) cannot run with strategy='megatrain': compiled code would read "
            "weights that are not in memory. Compile the layers: for layer in self.layers: "
            "layer.compile()."
        )
    if getattr(trainer.precision_plugin, "scales", False) and _nonfinite(trainer) == "raise":
        raise ConfigError(
            "nonfinite='raise' cannot run with precision='16-mixed': its scaler finds the largest "
            "scale by steps whose gradients are infinite, and skips them. Leave nonfinite out."
        )
    if trainer.num_nodes > 1:
        raise ConfigError(
            f"strategy='megatrain' runs on one machine, but num_nodes={trainer.num_nodes}; pass "
            "Trainer(num_nodes=1)."
        )


def _nonfinite(trainer: pl.Trainer) -> str:
    return trainer.strategy.options.nonfinite  # type: ignore[attr-defined]


def _refuse_lost(trainer: pl.Trainer, num_lost: int) -> None:
    if trainer.ckpt_path is None:  # type: ignore[attr-defined]
        raise ConfigError(
            f"the last fit failed and its pages went back to the last commit: they are {num_lost} "
            f"step(s) behind the loops of this trainer, which are at step {trainer.global_step}. "
            "Make a new Trainer with on_existing='resume', or give ckpt_path."
        )


def tell_of_halves(model: torch.nn.Module, precision: str) -> None:
    """Warn where weights are bfloat16 and nothing keeps what small updates add to them.

    Raises:
        ConfigError: They are so since this model was fitted in bf16-true: its masters would be
            dropped without a word, and inputs that are fp32 do not fit.
    """
    halves = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param.dtype == torch.bfloat16
    ]
    if precision == "bf16-true":
        _made_halves.add(model)
    elif halves and model in _made_halves:
        raise ConfigError(
            f"{len(halves)} parameter(s) are bfloat16 since this module was fitted with precision="
            f"'bf16-true', and precision is now {precision!r}. Fit with 'bf16-true' again; or call "
            "module.float() first, which begins from the bfloat16 weights (mt.save_masters writes "
            "the whole ones for load_state_dict)."
        )
    elif halves:
        log.warning(
            "%d parameter(s) are bfloat16 and precision is %r: the optimizer steps them in "
            "bfloat16, where small updates are lost, as with plain Lightning. Set precision="
            "'bf16-true' to keep fp32 masters, or load them as float32. The first: %s",
            len(halves),
            precision,
            halves[0],
        )


def eager_reason(
    model: pl.LightningModule, trainer: pl.Trainer, nonfinite: str, num_optimizers: int
) -> str | None:
    """Return why updates must wait for the whole backward, None when they need not."""
    if not model.automatic_optimization:
        return "optimization is manual"
    if num_optimizers != 1:
        return f"there are {num_optimizers} optimizers"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
        return "gradients are clipped by their norm"
    if getattr(trainer.precision_plugin, "scales", False):
        return "losses are scaled (16-mixed), and all gradients are looked at first"
    if nonfinite != "propagate":
        return f"nonfinite={nonfinite!r} looks at all gradients first"
    for name in _WATCHED_OF_MODULE:
        own = getattr(type(model), name) is not getattr(pl.LightningModule, name)
        if own or name in vars(model):
            return f"the module overrides {name}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in _WATCHED[1:]:
            if getattr(type(callback), name) is not getattr(pl.Callback, name):
                return f"{type(callback).__name__} overrides {name}"
    return None


def micro_batches(trainer: pl.Trainer) -> int | None:
    """Return how many backward passes make a step, None where that is not known."""
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    if scheduled or not trainer.lightning_module.automatic_optimization:
        return None
    return trainer.accumulate_grad_batches
