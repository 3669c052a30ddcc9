"""Metrics that are under way: torchmetrics inside a module, and what `self.log` accumulates."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import nn
from torchmetrics import Metric

_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def take_metrics(module: nn.Module) -> dict[str, Any]:
    """Return the state of every metric inside `module`, by its path."""
    return {
        path: _take(metric) for path, metric in module.named_modules() if isinstance(metric, Metric)
    }


def give_metrics(module: nn.Module, taken: dict[str, Any]) -> None:
    """Set the metrics inside `module` to what `take_metrics` returned."""
    for path, metric in module.named_modules():
        if isinstance(metric, Metric) and path in taken:
            _give(metric, taken[path])


def _take(metric: Metric) -> dict[str, Any]:
    states = {name: _copy(getattr(metric, name)) for name in metric._defaults}
    # What wrappers keep beside their states, such as the smallest value so far.
    own = {k: v for k, v in vars(metric).items() if k[0] != "_" and isinstance(v, torch.Tensor)}
    states |= {name: _copy(value) for name, value in own.items()}
    return {"states": states, "update_count": metric._update_count}


def _give(metric: Metric, taken: dict[str, Any]) -> None:
    for name, value in taken["states"].items():
        setattr(metric, name, _copy(value))
    metric._update_count = taken["update_count"]
    metric._computed = None


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [item.detach().clone() for item in value]


def take_results(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what `self.log` has accumulated in this epoch, and what it showed last."""
    results = {}
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        if result.has_reset:
            continue  # nothing in this epoch
        meta = {name: getattr(result.meta, name) for name in _META}
        results[key] = {
            "meta": {**meta, "reduce_fx": result.meta.reduce_fx.__name__},
            "is_tensor": result.is_tensor,
            "state": _take(result) if result.is_tensor else {},
        }
    connector = trainer._logger_connector
    shown = {
        name: {key: torch.as_tensor(value) for key, value in getattr(connector, name).items()}
        for name in _LOGGED
    }
    return {"results": results, "shown": shown, "first_batch": connector._first_loop_iter}


def give_results(trainer: pl.Trainer, taken: dict[str, Any]) -> None:
    """Let what is logged from now on be added to what `take_results` returned."""
    for name, values in taken["shown"].items():
        getattr(trainer._logger_connector, name).update(values)
    # In the first batch of an epoch, the first `self.log` begins anew.
    trainer._logger_connector._first_loop_iter = taken["first_batch"]
    results = trainer.fit_loop.epoch_loop._results
    results.__class__ = _Continued
    results.revived = set()  # type: ignore[attr-defined]
    modules = dict(trainer.lightning_module.named_modules())
    for key, kept in taken["results"].items():
        meta = _Metadata(**kept["meta"])
        meta.sync = _Sync()
        result = _ResultMetric(meta, kept["is_tensor"])
        if kept["is_tensor"]:
            _give(result, kept["state"])
        else:
            result.value = modules[kept["meta"]["metric_attribute"]]
            result._update_count = 1
        result.has_reset = False
        results[key] = result
        results.revived.add(key)  # type: ignore[attr-defined]


class _Continued(_ResultCollection):
    """Results some of which were logged before the run was interrupted.

    The first `self.log` of such a name puts its own description, functions included, in the place
    of the one that was kept; the accumulated value stays.
    """

    revived: set[str]
    described: tuple[str, dict[str, Any]] | None = None

    def __setitem__(self, key: str, result: _ResultMetric) -> None:
        super().__setitem__(key, result)
        if self.described is not None and self.described[0] == key:
            _give(result, self.described[1])
            result.has_reset = False

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See Lightning."""
        key = f"{fx}.{name}"
        if key in self.revived:
            self.revived.discard(key)
            result = self.pop(key)
            if result.is_tensor:
                self.described = (key, _take(result))
        super().log(fx, name, value, *args, **kwargs)  # type: ignore[misc]
        self.described = None
