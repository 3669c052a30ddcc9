"""N batches of which K run together read the weights once for each K of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from math import inf
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from mt_lightning import MegaTrainStrategy

from ..bytes import gpt
from ..bytes.cases import gpt_case
from ..bytes.gpt import wait_for_all
from ..bytes.simulator import RESIDENT, Case, Simulator
from .evaluate import loader
from .test_evaluation import groups, quiet

__all__ = ["groups", "quiet"]

DEPTH = 2
WIDTH = 64
# What waits at the entry of the head: the tokens, what goes into the norm and what comes out of it.
HELD_BYTES = gpt.NUM_TOKENS * 8 + 2 * gpt.NUM_TOKENS * WIDTH * 4


class ForwardSimulator(Simulator):
    """Plays forward passes alone; the model has no gradients and no optimizer state."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.read_bytes = self.written_bytes = 0
        self._free = case.budget_bytes
        self._pins = OrderedDict()
        self._jobs = deque()
        self._due = {}
        self._num_forwards = self._at = 0
        self._returning = False
        self._visited, self._unused = set(), set()
        for page in (RESIDENT, *range(len(case.units))):
            self._pin(page)
            self._pins[page] -= 1
        self._pin(RESIDENT)
        self.read_bytes = 0
        self._largest_bytes = max(unit.weight_bytes for unit in case.units)

    def predict(self, num_batches: int) -> list[int]:
        """Run batches; return how many ran together each time."""
        sizes = []
        while (num_left := num_batches - sum(sizes)) > 0:
            num_together = 1 if not sizes else min(num_left, self._num_fitting(num_left))
            for _ in range(num_together if sizes else 0):
                self._make_room(HELD_BYTES)
                self._free -= HELD_BYTES
            for page in range(len(self.case.units)):
                self._enter(page, grads=False)
                self._pins[page] -= 1
            self._free += num_together * HELD_BYTES if sizes else 0
            sizes.append(num_together)
        return sizes

    def _distance(self, page: int) -> float:
        """From the second pass on it is known that passes follow each other."""
        if self._num_forwards < 2:
            return inf
        return (page - self._at - 1) % len(self.case.units) + 1

    def _predict(self) -> list[int]:
        if self._num_forwards < 2:
            return []
        return sorted(range(len(self.case.units)), key=self._distance)[: self.case.depth]

    def _num_fitting(self, most: int) -> int:
        room_bytes = self.case.budget_bytes - self.case.resident.weight_bytes
        count = 0
        while count < most:
            units = 1 if count < 2 else 2
            if (count + 1) * HELD_BYTES > room_bytes - units * self._largest_bytes:
                break
            count += 1
        return max(1, count)


class Predicting(gpt.GPT):
    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch[:, :-1]).mean()


class Marks(pl.Callback):
    """Notes the bytes read before the first batch and after the last one."""

    def __init__(self) -> None:
        self.marks: list[int] = []

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        wait_for_all(trainer)
        self.marks.append(trainer.strategy.engine.stats.bytes_read)

    on_predict_epoch_end = on_predict_start


@pytest.mark.parametrize(("num_batches", "num_fitting"), [(1, 4), (5, 1), (13, 2), (13, 4), (9, 8)])
def test_bytes_are_predicted(
    num_batches: int, num_fitting: int, tmp_path: Path, groups: list[int]
) -> None:
    model = gpt_case(budget="smallest", depth=DEPTH, deferred=False, micro_batches=1)
    largest_bytes = max(unit.weight_bytes for unit in model.units)
    # Two batches may take the room of the unit that is read ahead.
    limit_bytes = model.resident.weight_bytes + largest_bytes * (1 + (num_fitting > 2))
    limit_bytes += num_fitting * HELD_BYTES
    case = dataclasses.replace(model, budget_bytes=limit_bytes)
    marks = Marks()
    strategy = MegaTrainStrategy(max_ram_gb=limit_bytes / 2**30, _depth=DEPTH)
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        callbacks=[marks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    batches: Any = list(torch.randint(0, 300, (num_batches, 1, gpt.NUM_TOKENS + 1)))
    trainer.predict(Predicting(WIDTH, 5, 300), loader(batches))
    simulator = ForwardSimulator(case)
    assert groups == simulator.predict(num_batches)
    assert max(groups[1:], default=num_fitting) == num_fitting
    read = marks.marks[1] - marks.marks[0]
    assert read == simulator.read_bytes
    assert strategy.engine is not None
    assert strategy.engine.stats.ram_peak_bytes <= limit_bytes
    num_sweeps = 1 + -(-(num_batches - 1) // num_fitting)
    sizes = [unit.weight_bytes for unit in case.units]
    # At the end of a sweep the next one is read ahead.
    assert read <= num_sweeps * sum(sizes) + sum(sizes[:DEPTH])
