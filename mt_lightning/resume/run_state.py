"""Everything that a run is beside its pages, taken at the end of a step and given to another run.

[Note: when it is taken]
After `on_train_batch_end` and the progress counters, before any validation or epoch-end hook that
is due. A run that goes on starts as any run does, with all hooks, and then takes the state instead
of its first batch; so the validation or the hooks that were due come next, as they would have.
"""

from __future__ import annotations

import io
import logging
import pickle
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call

from mt_lightning.errors import ConfigError, CorruptPageError
from mt_lightning.plugins.refusals import micro_batches
from mt_lightning.resume.metrics import give_metrics, give_results, take_metrics, take_results
from mt_lightning.resume.position import DataPosition
from mt_lightning.resume.rng import give_rng, take_rng

log = logging.getLogger(__name__)

_VERSION = 1


def take(trainer: pl.Trainer, position: DataPosition) -> dict[str, Any]:
    """Return the state of a run whose step has just ended, as tensors and plain values."""
    module, datamodule = trainer.lightning_module, _datamodule(trainer)
    return {
        "version": _VERSION,
        "global_step": trainer.global_step,
        "loops": trainer.fit_loop.state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "datamodule": datamodule.state_dict() if datamodule is not None else {},
        "optimizers": [_groups(optimizer) for optimizer in trainer.optimizers],
        "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "buffers": {name: buffer.detach() for name, buffer in module.named_buffers()},
        "metrics": take_metrics(module),
        "results": take_results(trainer),
        "data": position.take(),
        "micro_batches": micro_batches(trainer),
        "rng": take_rng(),
    }


def _datamodule(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    return trainer.datamodule  # type: ignore[attr-defined]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


class Packer:
    """Turns states of runs into bytes that `torch.load(weights_only=True)` reads.

    State of a callback or scheduler that it would not read is left out, with one warning.
    """

    def __init__(self) -> None:
        self._unreadable: set[tuple[str, Any]] | None = None

    def pack(self, state: dict[str, Any]) -> bytes:
        """Return the state as bytes."""
        if self._unreadable is None:
            self._unreadable = self._find_unreadable(state)
        for part, key in self._unreadable:
            state[part].pop(key, None)
        return _to_bytes(state)

    @staticmethod
    def _find_unreadable(state: dict[str, Any]) -> set[tuple[str, Any]]:
        found = set()
        for key, value in state["callbacks"].items():
            if not _is_readable(value):
                found.add(("callbacks", key))
                log.warning(
                    "the state of callback %s holds more than tensors and plain values: a run that "
                    "is resumed starts it anew.",
                    key,
                )
        for name, value in state.items():
            if name != "callbacks" and not _is_readable(value):
                raise ConfigError(
                    f"the state of this run's {name.replace('_', ' ')} holds more than tensors and "
                    "plain values, so no commit could be resumed. Keep such objects out of "
                    "state_dict()."
                )
        return found


def unpack(data: bytes) -> dict[str, Any]:
    """Return what `Packer.pack` was given.

    Raises:
        CorruptPageError: The bytes are not what this version wrote.
    """
    try:
        state = torch.load(io.BytesIO(data), weights_only=True)
        version = state["version"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError) as error:
        raise CorruptPageError(None, f"the state of the run cannot be read: {error}") from error
    if version != _VERSION:
        raise CorruptPageError(
            None, f"the state of the run has version {version}; this release reads {_VERSION}"
        )
    return state


def _is_readable(value: Any) -> bool:
    try:
        torch.load(io.BytesIO(_to_bytes(value)), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def give_early(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Give a run what its hooks and loops look at before the first batch.

    Raises:
        ConfigError: The run is not the one that was committed.
    """
    _check(trainer, state)
    module = trainer.lightning_module
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
    datamodule = _datamodule(trainer)
    if datamodule is not None and state["datamodule"]:
        datamodule.load_state_dict(state["datamodule"])
    call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
    for optimizer, groups in zip(trainer.optimizers, state["optimizers"], strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
    for config, saved in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    give_metrics(module, state["metrics"])
    give_loops(trainer, state)


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


def give_late(trainer: pl.Trainer, state: dict[str, Any], position: DataPosition) -> None:
    """Bring a run that is about to take its first batch to where the other one was."""
    give_loops(trainer, state)
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    position.give(state["data"], fetcher)
    give_metrics(trainer.lightning_module, state["metrics"])
    give_results(trainer, state["results"])
    give_rng(state["rng"])


def _check(trainer: pl.Trainer, state: dict[str, Any]) -> None:
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
            raise ConfigError(
                f"the {what} is {value}, and the run in offload_dir was committed with "
                f"{then[what]}. Go on with the same settings, or set on_existing='overwrite'."
            )
