"""Units that were run count with the time they took; the others by rates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mt_lightning.commands.plan.model import find_model, worker_for
from mt_lightning.engine.options import Options
from mt_lightning.errors import BudgetError
from mt_lightning.planning import timed as module
from mt_lightning.planning.machines import find_machine
from mt_lightning.planning.planner import answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.timed import timed
from mt_lightning.planning.training import Training


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(sequence_length=32, precision="32-true", options=Options(max_ram_gb=0.5))


def test_each_kind_of_unit_is_run_once_and_counts_for_all_alike(training: Training) -> None:
    model = find_model("tiny")
    counted = worker_for(model)(training)
    work = timed(model, counted, training)
    assert len(counted.samples) < len(model.units)
    assert all(p.is_meta for p in model.root.parameters())
    for sample in counted.samples:
        seconds = {(work.units[i].forward_s, work.units[i].backward_s) for i in sample.alike}
        assert len(seconds) == 1
        assert min(seconds.pop()) > 0
    assert {i for sample in counted.samples for i in sample.alike} == set(range(len(model.units)))


def test_measured_seconds_take_the_place_of_rates(training: Training) -> None:
    model, machine = find_model("tiny"), find_machine("dgx-spark")
    counted = worker_for(model)(training)
    units = tuple(dataclasses.replace(w, forward_s=1.0, backward_s=2.0) for w in counted.units)
    work = dataclasses.replace(counted, units=units)
    found = answer(model, training, machine, lambda _: work)
    assert found.time is not None
    assert found.tiers is not None
    again = len(units) - len(found.tiers.kept_graphs)
    assert found.time.seconds == pytest.approx(3 * len(units) + again, rel=0.01)
    assert simulate(found, num_steps=1).step_s == pytest.approx(3 * len(units) + again, rel=0.01)


def test_a_unit_that_memory_cannot_hold_is_refused(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = find_model("tiny")
    work = worker_for(model)(training)
    monkeypatch.setattr(module, "ram_limit_bytes", lambda _: 1)
    with pytest.raises(BudgetError, match=r"cannot be timed.*Plan without"):
        timed(model, work, training)


def test_what_a_unit_takes_grows_with_its_batch(training: Training) -> None:
    model = find_model("tiny")
    worker = worker_for(model, times=True)
    large = dataclasses.replace(training, batch_size=64)
    with torch.no_grad():  # must not matter
        small_s, large_s = (
            sum(w.forward_s + w.backward_s for w in worker(t).units) for t in (training, large)
        )
    assert large_s > 3 * small_s
