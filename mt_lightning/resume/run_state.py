"""Everything that a run is beside its pages, taken at the end of a step and given to another run.

[Note: when it is taken]
After `on_train_batch_end` and the progress counters, before any validation or epoch-end hook that
is due. A run that goes on starts as any run does, with all hooks, and then takes the state instead
of its first batch; so the validation or the hooks that were due come next, as they would have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from torch import nn

from mt_lightning.errors import ConfigError
from mt_lightning.plugins.refusals import micro_batches
from mt_lightning.resume.buffers import Buffers
from mt_lightning.resume.metrics import give_metrics, give_results, take_metrics, take_results
from mt_lightning.resume.packer import VERSION
from mt_lightning.resume.position import DataPosition


def take(
    trainer: pl.Trainer,
    position: DataPosition,
    buffers: Buffers,
    callbacks: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the state of a run whose step has just ended, as tensors and plain values.

    Args:
        trainer: The trainer.
        position: Where it is in its data.
        buffers: The buffers of its module.
        callbacks: Returns the states of its callbacks; None: as a checkpoint has them.
    """
    states = callbacks or partial(call._call_callbacks_state_dict, trainer)
    module, datamodule = trainer.lightning_module, _datamodule(trainer)
    return {
        "version": VERSION,
        "loops": _loops(trainer),
        "callbacks": states(),
        "datamodule": datamodule.state_dict() if datamodule is not None else {},
        "optimizers": [_groups(optimizer) for optimizer in trainer.optimizers],
        "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin.state_dict(),
        "buffers": buffers.changed(),
        "kept_buffers": buffers.name,
        "extra_states": {path: each.get_extra_state() for path, each in _with_extra_state(module)},
        "metrics": take_metrics(module),
        "results": take_results(trainer),
        "data": position.take(),
        "micro_batches": micro_batches(trainer),
        "limits": [trainer.max_steps, trainer.max_epochs],
        "reloads": {name: getattr(loop, attribute) for name, loop, attribute in _reloads(trainer)},
    }


def _loops(trainer: pl.Trainer) -> dict[str, Any]:
    loops = trainer.fit_loop.state_dict()
    # Lightning would load the states of loaders on its own; they are part of the data position.
    loops["state_dict"] = {k: v for k, v in loops["state_dict"].items() if k != "combined_loader"}
    return loops


def _with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (path, each)
        for path, each in module.named_modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state
    ]


def _reloads(trainer: pl.Trainer) -> list[tuple[str, _Loop, str]]:
    """Where Lightning keeps the epoch in which it last asked for dataloaders."""
    loop = trainer.fit_loop
    return [
        ("train", loop, "_last_train_dl_reload_epoch"),
        ("validation", loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch"),
    ]


def _datamodule(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    return trainer.datamodule  # type: ignore[attr-defined]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def give_early(trainer: pl.Trainer, state: dict[str, Any], buffers: Buffers) -> None:
    """Give a run what its hooks and loops look at before the first batch.

    Raises:
        ConfigError: The run is not the one that was committed.
    """
    reason = difference(trainer, state)
    if reason is not None:
        raise ConfigError(
            f"{reason}. Go on with the same settings, or set on_existing='overwrite'."
        )
    _give(trainer, state, buffers)
    give_loops(trainer, state)


def _give(trainer: pl.Trainer, state: dict[str, Any], buffers: Buffers) -> None:
    module, datamodule = trainer.lightning_module, _datamodule(trainer)
    buffers.give(state["buffers"])
    for path, each in _with_extra_state(module):
        if path in state["extra_states"]:
            each.set_extra_state(state["extra_states"][path])
    if datamodule is not None and state["datamodule"]:
        datamodule.load_state_dict(state["datamodule"])
    call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
    for optimizer, groups in zip(trainer.optimizers, state["optimizers"], strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
    for config, saved in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    if state.get("precision"):  # runs that were committed before it was kept have none
        trainer.precision_plugin.load_state_dict(state["precision"])
    give_metrics(module, state["metrics"])


def give_loops(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Set all progress counters, without Lightning's own ideas of what is to be done again."""
    loop = trainer.fit_loop
    loop.load_state_dict(state["loops"])
    _forget_restart(loop)


def _forget_restart(loop: _Loop) -> None:
    # Not by the property: the fit loop has its own mind about that.
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            _forget_restart(each)


def give_late(
    trainer: pl.Trainer, state: dict[str, Any], position: DataPosition, buffers: Buffers
) -> None:
    """Bring a run that is about to take its first batch to where the other one was."""
    # Once more: hooks that every start runs, and the sanity check, may have changed it.
    _give(trainer, state, buffers)
    give_loops(trainer, state)
    for name, loop, attribute in _reloads(trainer):
        setattr(loop, attribute, state["reloads"][name])
    give_results(trainer, state["results"])
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    position.give(state["data"], fetcher)


def difference(trainer: pl.Trainer, state: dict[str, Any]) -> str | None:
    """Return in what a run differs from the one whose state was taken, None where it may go on."""
    now = {
        "number of optimizers": len(trainer.optimizers),
        "number of param groups": [len(o.param_groups) for o in trainer.optimizers],
        "number of learning rate schedulers": len(trainer.lr_scheduler_configs),
        "accumulate_grad_batches": micro_batches(trainer),
    }
    then = {
        "number of optimizers": len(state["optimizers"]),
        "number of param groups": [len(groups) for groups in state["optimizers"]],
        "number of learning rate schedulers": len(state["lr_schedulers"]),
        "accumulate_grad_batches": state["micro_batches"],
    }
    for what, value in now.items():
        if value != then[what]:
            return f"the {what} is {value}, and the run was committed with {then[what]}"
    return None
