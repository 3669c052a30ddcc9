"""Logs and metrics of batches that run together, in the order of the batches.

[Note: in turn]
A value that is logged counts when it is the batch's turn: when all batches before it have ended.
Until then it is kept. A metric is updated at once, because it may be given logits that nobody wants
to keep; but a batch waits with its update until those before it have updated the metric as often as
a batch did that ran alone. Sums are then added in the same order, to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torchmetrics import Metric, MetricCollection

from mt_lightning.engine.window.forward import ForwardWindow, Step
from mt_lightning.engine.window.micro import current


def metrics_of(root: nn.Module) -> list[nn.Module]:
    """Return all metrics of a model, with what they hold."""
    found: dict[int, nn.Module] = {}
    for module in root.modules():
        if isinstance(module, (Metric, MetricCollection)):
            found.update((id(inner), inner) for inner in module.modules())
    return list(found.values())


class LogsInTurn:
    """Keeps what a step logs until its turn.

    Args:
        window: Whose steps.
        results: Where Lightning collects logs.
    """

    def __init__(self, window: ForwardWindow, results: _ResultCollection) -> None:
        self._window = window
        self._results: Any = results
        self._log: Callable[..., None] = self._results.log
        self._kept: dict[Step, list[Callable[[], None]]] = {}
        self._results.__dict__["log"] = self._take

    def detach(self) -> None:
        """Let logs count at once."""
        self._results.__dict__.pop("log", None)
        self._kept.clear()

    def flush(self, step: Step) -> None:
        """Let what a step has logged count; called inside the step, at its turn."""
        for log in self._kept.pop(step, ()):
            log()

    def _take(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        step = current()
        if not isinstance(step, Step) or (self._window.is_turn(step) and not self._kept.get(step)):
            self._log(fx, name, value, *args, **kwargs)
            return
        kept = self._kept.setdefault(step, [])
        if isinstance(value, torch.Tensor):
            # As it is now: the step goes on and may write to it.
            kept.append(partial(self._log, fx, name, value.detach().clone(), *args, **kwargs))
            return
        cache = getattr(value, "_forward_cache", None)
        kept.append(partial(self._log_metric, cache, fx, name, value, *args, **kwargs))

    def _log_metric(
        self, cache: Any, fx: str, name: str, metric: Any, *args: Any, **kw: Any
    ) -> None:
        now, metric._forward_cache = metric._forward_cache, cache
        try:
            self._log(fx, name, metric, *args, **kw)
        finally:
            metric._forward_cache = now


class MetricsInTurn:
    """Lets steps update metrics in the order of their batches.

    Args:
        window: Whose steps.
        root: The model.
        usual: How often a step updates each metric, by position; taken over from run to run.

    Attributes:
        num_other_orders: Updates that came after those of a later batch.
    """

    def __init__(self, window: ForwardWindow, root: nn.Module, usual: Counter[int]) -> None:
        self._window = window
        self._usual = usual
        self._counts: dict[Step, Counter[int]] = {}
        self._inside: dict[int, Step] = {}
        self.num_other_orders = 0
        inner = {
            id(part)
            for module in root.modules()
            if isinstance(module, (Metric, MetricCollection))
            for part in module.modules()
            if part is not module
        }
        # What a metric or a collection does with those that it holds is its own business.
        self._metrics = [m for m in metrics_of(root) if id(m) not in inner]
        self._own: list[dict[str, Any]] = []
        for place, metric in enumerate(self._metrics):
            own = {name: metric.__dict__.get(name) for name in ("update", "forward")}
            self._own.append(own)
            for name in own:
                metric.__dict__[name] = partial(self._call, place, getattr(metric, name))

    def detach(self) -> None:
        """Leave the metrics alone."""
        for metric, own in zip(self._metrics, self._own, strict=True):
            for name, value in own.items():
                if value is None:
                    metric.__dict__.pop(name, None)
                else:
                    metric.__dict__[name] = value
        self._counts.clear()

    def ended(self, step: Step, *, alone: bool) -> None:
        """Take note that a step has ended; one that ran alone shows what is usual."""
        counts = self._counts.pop(step, Counter())
        if alone:
            self._usual.clear()
            self._usual.update(counts)

    def _call(self, place: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = current()
        if not isinstance(step, Step) or self._inside.get(place) is step:
            return call(*args, **kwargs)
        if not self._may(place, step):
            step.pause(lambda: self._may(place, step))
        if any(
            each.number > step.number and counts[place] for each, counts in self._counts.items()
        ):
            self.num_other_orders += 1
        self._counts.setdefault(step, Counter())[place] += 1
        # A metric that runs a model of its own may stop on the way.
        self._inside[place] = step
        try:
            return call(*args, **kwargs)
        finally:
            del self._inside[place]

    def _may(self, place: int, step: Step) -> bool:
        usual = self._usual[place]
        return place not in self._inside and all(
            usual and self._counts.get(other, Counter())[place] >= usual
            for other in self._window.before(step)
        )
