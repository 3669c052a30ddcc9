"""After the check everything is as if the first window had never run a second time."""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from mt_lightning.layer_major.first_window import FirstWindow

from . import networks as nets
from . import odd_networks as odd
from .auto import fit_auto, order_of
from .run import Batch, Subject, assert_same, fit

VARIED = nets.tokens(13, [9, 16, 12, 5])

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightning.pytorch")
    torch.set_num_threads(1)


class Lines(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    name = "lines"
    version = 0

    @property
    def experiment(self) -> list[Any]:
        return self.lines

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, sorted(metrics.items())))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Keeping(Subject):
    """Steps leave traces in every way that stays within the process and the module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.mean = MeanMetric()
        self.every = CatMetric()
        self.nested: dict[str, Any] = {"lengths": [], "counts": Counter(), "last": deque(maxlen=3)}
        self.ordered: OrderedDict[int, int] = OrderedDict()
        self.meter = odd.Meter()
        self.total = torch.zeros(())
        self.array = np.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)
        self.python_generator = random.Random(1)
        self.bytes = bytearray()
        self.factor = 1.0
        self.num_calls = 0

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.factor = 1.0 + 0.01 * batch_idx

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        factor = self.factor
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        noise += float(torch.rand((), generator=self.generator)) + self.python_generator.random()
        noise += float(self.numpy_generator.random())
        self.num_calls += 1
        length = batch["input_ids"].shape[1]
        self.nested["lengths"].append(length)
        self.nested["counts"][length] += 1
        self.nested["last"].append(batch_idx)
        self.ordered[batch_idx] = length
        self.ordered.move_to_end(batch_idx, last=False)
        self.total += length
        self.array[batch_idx % 3] += length
        self.bytes.append(length)
        loss = self.network(**batch).loss * factor * (1.0 + 0.01 * noise)
        self.losses.append(loss.detach().clone())
        self.meter.update(length, loss)
        self.mean.update(loss.detach())
        self.every.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=1)
        self.log("mean", self.mean, on_step=True, on_epoch=True, batch_size=1)
        for logger in self.loggers:
            logger.experiment.append(("direct", batch_idx))
        return loss

    def on_train_epoch_end(self) -> None:
        self.every.reset()


class Looks(pl.Callback):
    """Looks at everything after each batch of the first window, and after each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop = trainer.fit_loop.epoch_loop
        if trainer.global_step and loop._should_accumulate():
            return
        metric_states = [
            (name, _plain(value))
            for metric in (module.mean, module.every)
            for name, value in sorted(metric.metric_state.items())
        ]
        self.seen.append(
            {
                "batch": (batch_idx, trainer.global_step, trainer.should_stop),
                "outputs": sorted((k, _plain(v)) for k, v in outputs.items()),
                "callback": _metrics(trainer.callback_metrics),
                "progress": _metrics(trainer.progress_bar_metrics),
                "logged": _metrics(trainer.logged_metrics),
                "torch": torch.get_rng_state().tolist()[:64],
                "python": random.getstate()[1][-1],
                "numpy": np.random.get_state()[2],
                "own": (
                    module.generator.get_state().tolist()[:64],
                    module.python_generator.getstate()[1][-1],
                    str(module.numpy_generator.bit_generator.state),
                ),
                "metrics": metric_states,
                "nested": {
                    "lengths": list(module.nested["lengths"]),
                    "counts": dict(module.nested["counts"]),
                    "last": list(module.nested["last"]),
                },
                "ordered": list(module.ordered.items()),
                "meter": (module.meter.num_seen, _plain(module.meter.by_length)),
                "total": float(module.total),
                "array": module.array.tolist(),
                "bytes": bytes(module.bytes),
                "num_calls": (module.num_calls, len(module.losses)),
                "buffers": [(n, _plain(b)) for n, b in module.named_buffers()],
                "progress counters": str(loop.state_dict()),
                "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
            }
        )


def _metrics(metrics: Any) -> list[Any]:
    return sorted((name, _plain(value)) for name, value in metrics.items())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def seed() -> None:
    random.seed(5)
    np.random.seed(5)


@pytest.mark.parametrize(
    ("make", "order", "words"),
    [
        (nets.Tiny, "layer-major", "bit for bit"),
        (odd.Counting, "layer-major", "units that change a buffer"),
        (odd.GloballyFlagged, "usual", "the loss of batch 0"),
        (odd.Alone, "usual", "two steps at once"),
    ],
)
def test_nothing_shows_that_the_window_ran_twice(
    make: Any, order: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    replay = FirstWindow._replay

    def counted(self: FirstWindow, comparison: Any) -> None:
        replays.append(len(self._steps))
        replay(self, comparison)

    monkeypatch.setattr(FirstWindow, "_replay", counted)
    settings: dict[str, Any] = {"subject": Keeping, "accumulate_grad_batches": 4}
    if make is odd.Counting:
        settings["max_steps"] = 1
    found = []
    for auto in (False, True):
        looks, lines = Looks(), Lines()
        both = {**settings, "callbacks": (looks,), "loggers": lines}
        seed()
        if auto:
            budget = {"prepare": seed, "room_mib": 0.3}
            outcome, strategy = fit_auto(tmp_path, make, VARIED, **budget, **both)
            assert order_of(strategy)[0] == order, order_of(strategy)
            assert words in order_of(strategy)[1]
        else:
            outcome = fit(tmp_path, make, VARIED, None, **both)
        found.append({**outcome, "lines": lines.lines, "seen": looks.seen})
    assert replays
    assert replays[0] >= 2
    assert len(replays) == 1
    expected, actual = found
    for one, other in zip(expected["seen"], actual["seen"], strict=True):
        for name, value in one.items():
            assert value == other[name], name
    assert_same(expected, actual)
