"""What the engine holds does not grow with the number of steps."""

from __future__ import annotations

import gc
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

import mt_lightning as mt

from ..faults.nets import Evaluated, loader, make_trainer

CONTAINERS = (list, dict, set, deque)
BOUNDED = {
    # Sequences of accesses, up to the limits that are named there.
    "ContextModel._history",
    "ContextModel._tables",
    "ContextModel._places",
    "ContextModel._trust",
}
WARM, LAST = 12, 48


def lengths() -> Counter[str]:
    """Return the lengths of all containers that objects of the package hold, by attribute."""
    found: Counter[str] = Counter()
    for value in gc.get_objects():
        kind = type(value)
        if not str(kind.__module__).startswith("mt_lightning."):
            continue
        found[kind.__name__] += 1
        slots = (name for each in kind.__mro__ for name in getattr(each, "__slots__", ()))
        for name in {*getattr(value, "__dict__", {}), *slots}:
            held: Any = getattr(value, name, None)
            if type(held) in CONTAINERS:
                found[f"{kind.__name__}.{name}"] += len(held)
    return found


class Watch(Callback):
    """Looks twice, many steps apart."""

    def __init__(self) -> None:
        self.found: list[Counter[str]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The first batch at that step; with accumulation others follow.
        if trainer.global_step == (LAST if self.found else WARM) and len(self.found) < 2:
            gc.collect()
            self.found.append(lengths())


class Stashing(Evaluated):
    """Each step leaves a graph behind that no backward goes through; the next one replaces it."""

    left: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.left = self.layers[0](batch)
        return loss


ONE_BY_ONE = GradientAccumulationScheduler({0: 1, 1000: 2})
"""Steps of one batch in a run that will have larger ones."""


@pytest.mark.parametrize(
    ("model", "options", "settings"),
    [
        (Evaluated, {"durability": "step"}, {}),
        pytest.param(
            Evaluated,
            {"layer_major": True},
            {"accumulate_grad_batches": 2},
            marks=pytest.mark.slow,
        ),
        (Evaluated, {"layer_major": True}, {"callbacks": [ONE_BY_ONE]}),
        (Stashing, {}, {}),
    ],
    ids=["default", "windows", "one batch per window", "graphs left behind"],
)
def test_nothing_grows_with_the_number_of_steps(
    tmp_path: Path, model: type[Evaluated], options: dict[str, Any], settings: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    watch = Watch()
    strategy = mt.MegaTrainStrategy(tmp_path / "pages", **options)
    trainer = make_trainer(
        tmp_path,
        strategy,
        max_steps=LAST,
        max_epochs=-1,
        val_check_interval=8,
        limit_val_batches=2,
        **{**settings, "callbacks": [watch, *settings.get("callbacks", [])]},
    )
    trainer.fit(model(), loader(8), loader(2))
    before, after = watch.found
    grown = {
        name: (before[name], count)
        for name, count in after.items()
        # Not all is at the same point at both steps: I/O goes on, ended executions are listed.
        if name not in BOUNDED and count - before[name] > (LAST - WARM) // 4
    }
    assert not grown, grown
