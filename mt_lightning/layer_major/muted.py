"""Runs steps of which nobody must hear: what they log goes nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import Logger


@contextmanager
def muted(trainer: pl.Trainer) -> Iterator[None]:
    """Let `self.log` and loggers take what they are given and forget it.

    Afterwards the trainer holds what it held before: logged values, metrics of callbacks and of the
    progress bar, loggers, and whether it was asked to stop.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    results, loggers, stopping = loop._results, trainer._loggers, trainer.should_stop
    attributes = dict(vars(connector))
    metrics = {name: dict(each) for name, each in attributes.items() if isinstance(each, dict)}
    fx = trainer.lightning_module._current_fx_name
    loop._results = type(results)(training=True)
    trainer._loggers = [_Mute(logger) for logger in loggers]  # type: ignore[misc]
    try:
        yield
    finally:
        loop._results, trainer._loggers, trainer.should_stop = results, loggers, stopping
        trainer.lightning_module._current_fx_name = fx
        vars(connector).update(attributes)
        for name, kept in metrics.items():
            attributes[name].clear()
            attributes[name].update(kept)


class _Mute:
    """Stands in for a logger: it is what the logger is, but writes nothing."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment":
            return _Nowhere()
        if name.startswith("log_"):
            return _nothing
        return getattr(self._logger, name)


class _Nowhere:
    """Takes every call and every item, and gives itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, name: Any) -> Any:
        return self

    def __setitem__(self, name: Any, value: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def _nothing(*_: Any, **__: Any) -> None:
    pass
