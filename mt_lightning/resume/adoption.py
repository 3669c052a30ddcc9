"""The state of a run out of a checkpoint, for a run that goes on from it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mt_lightning.errors import CorruptPageError
from mt_lightning.plugins.linked import RUN_STATE
from mt_lightning.plugins.run_file import MISSING, is_taken_in
from mt_lightning.resume.packer import unpack
from mt_lightning.resume.run_state import difference

_STEPS = (
    ("epoch_loop.automatic_optimization.optim_progress", ("optimizer", "step", "total")),
    ("epoch_loop.manual_optimization.optim_step_progress", ("total",)),
)
_SAVED = ("best_model_path", "last_model_path")


def state_in(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the state that a checkpoint holds, or why a run cannot go on from it exactly.

    Args:
        trainer: The trainer of the run that goes on; weights and loops have been restored.
        checkpoint: As `PagedCheckpointIO` loads it.
    """
    found = checkpoint.get(RUN_STATE)
    if isinstance(found, Mapping) and MISSING in found:
        return str(found[MISSING])
    if not is_taken_in(checkpoint):
        return "it holds no state of a paged run"
    assert found is not None
    try:
        state = unpack(found["state"])
    except CorruptPageError as error:
        return str(error)
    then, now = _steps(state["loops"]), _steps(checkpoint["loops"]["fit_loop"])
    if then != now:
        return f"its weights are those of step {now}, and its state that of step {then}"
    reason = difference(trainer, state)
    if reason is not None:
        return reason
    first = torch.load(io.BytesIO(found["buffers"]), weights_only=True)
    # All of them: this run keeps others at its start.
    state = {**state, "buffers": {**first, **state["buffers"]}}
    if _batches(checkpoint["loops"]["fit_loop"]) >= _batches(state["loops"]):
        _remember_saves(trainer, state, checkpoint)
    return state


def _steps(loops: Mapping[str, Any]) -> list[int]:
    """Return how many steps automatic and manual optimisation have taken."""
    found = []
    for key, path in _STEPS:
        value = loops[key]
        for name in path:
            value = value[name]
        found.append(value["completed"])
    return found


def _batches(loops: Mapping[str, Any]) -> int:
    return loops["epoch_loop.batch_progress"]["total"]["completed"]


def _remember_saves(
    trainer: pl.Trainer, state: dict[str, Any], checkpoint: Mapping[str, Any]
) -> None:
    """Let callbacks that saved this checkpoint know of it, and not save it again.

    It was saved after the moment of the state, and the validation or the end of the epoch that it
    was saved in comes again.
    """
    saved = checkpoint.get("callbacks", {})
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        key = callback.state_key
        if not isinstance(callback, ModelCheckpoint) or not {key} <= saved.keys():
            continue
        before = state["callbacks"].get(key, {})
        if any(saved[key].get(name) != before.get(name) for name in _SAVED) or list(
            saved[key].get("best_k_models", {})
        ) != list(before.get("best_k_models", {})):
            state["callbacks"] = {**state["callbacks"], key: saved[key]}
            callback._last_global_step_saved = checkpoint["global_step"]
