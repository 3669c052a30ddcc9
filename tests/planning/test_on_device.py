"""A device is planned by the policy of a run: what fits stays there and is updated there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from mt_lightning.commands.plan.model import worker_for
from mt_lightning.commands.plan.tables import as_data
from mt_lightning.engine.options import Options
from mt_lightning.planning.footprint import footprint
from mt_lightning.planning.machines import find_machine
from mt_lightning.planning.on_device import PlannedLink, stays_there
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.tiers import lay_out, place
from mt_lightning.planning.timing import DOWN, UP, UPDATE
from mt_lightning.planning.training import Training
from mt_lightning.tiers.delayed import DelayedLink

from .begun import attached
from .test_plan import llama, on_meta

NVLINK = find_machine("gh200")


def plan(micros: int = 1, precision: Any = "32-true", **options: Any) -> Answer:
    given = {"max_ram_gb": 1.0, "max_vram_gb": 0.1, **options}
    training = Training(
        batch_size=2,
        sequence_length=64,
        accumulate_grad_batches=micros,
        precision=precision,
        options=Options(**given),
    )
    model = on_meta()
    return answer(model, training, NVLINK, worker_for(model))


def test_what_fits_the_device_stays_there_and_is_updated_there() -> None:
    found = plan()
    assert found.plan is not None
    assert found.tiers is not None
    assert found.time is not None
    assert found.build is not None
    assert stays_there(found.plan)
    state = sum(page.state.nbytes for page in found.build.table)
    assert found.tiers.device["optimizer state"] >= state
    for phase in found.time.phases:
        assert not any(phase.busy_s[part] for part in (UP, DOWN, UPDATE))
    played = simulate(found)
    assert not any(played.busy_s.get(part, 0.0) > 1e-12 for part in (UP, DOWN, UPDATE))
    assert played.step_s == pytest.approx(found.time.seconds)
    assert footprint(found)[-1].device == found.tiers.device_bytes


def test_masters_stay_there_too() -> None:
    found = plan(precision="bf16-true")
    assert found.plan is not None
    assert found.build is not None
    assert found.tiers is not None
    assert stays_there(found.plan)
    state = sum(page.state.nbytes for page in found.build.table)
    assert found.tiers.device["optimizer state"] >= state + found.plan.master_bytes
    assert not simulate(found).busy_s.get(DOWN, 0.0)
    assert as_data(found, None, None, [])["plan"]["updates_on"] == "device"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_vram_gb": 0.002}, "max_vram_gb does not hold"),
        ({"optimizer_compression": True}, "optimizer_compression"),
        ({"optimizer_compression": "lossless"}, "optimizer_compression"),
        ({"durability": "step"}, "durability='step'"),
    ],
)
def test_what_does_not_fit_is_updated_on_the_host(options: dict[str, Any], reason: str) -> None:
    found = plan(**options)
    assert found.plan is not None
    assert not stays_there(found.plan)
    assert found.plan.on_device is not None
    assert found.plan.on_device.host_reason.startswith(reason)
    (row,) = [row for row in found.plan.rows() if row[0] == "  updated there"]
    assert row[2].startswith(f"the host updates: {reason}")
    assert as_data(found, None, None, [])["plan"]["updates_on"] == "host"
    assert simulate(found).busy_s[DOWN] > 0


def test_batches_run_unit_by_unit_where_weights_cross_the_link() -> None:
    roomy, short = plan(4, durability="step"), plan(4, durability="step", max_vram_gb=0.0005)
    assert roomy.plan is not None
    assert short.plan is not None
    assert (roomy.plan.order, short.plan.order) == ("usual", "undecided")


def test_gradients_that_are_rounded_leave_in_half_the_time_and_wait_in_half_the_room() -> None:
    whole, half = (plan(durability="step", gradient_dtype=dtype) for dtype in ("fp32", "bf16"))
    assert whole.plan is not None
    assert half.plan is not None
    assert whole.time is not None
    assert half.time is not None
    assert half.plan.grad_bytes * 2 == whole.plan.grad_bytes
    assert whole.build is not None
    pages = list(whole.build.table)
    inside = [page for page in pages if page.index not in whole.build.resident]
    for counted, busy in (
        (inside, [simulate(found).busy_s[DOWN] for found in (whole, half)]),
        (pages, [found.time.phases[-1].busy_s[DOWN] for found in (whole, half) if found.time]),
    ):
        spared = sum(page.layout.grad_bytes for page in counted) / 2
        assert busy[0] - busy[1] == pytest.approx(spared / NVLINK.device.down_bytes_per_s)
    there = [plan(gradient_dtype=dtype).tiers for dtype in ("fp32", "bf16")]
    assert there[0] is not None
    assert there[1] is not None
    assert there[1].device["gradients"] * 2 == there[0].device["gradients"]


@pytest.mark.parametrize(
    ("max_vram_gb", "micros", "gradient_dtype"),
    [(0.0005, 1, "bf16"), (0.0005, 4, "fp32"), (0.1, 1, "fp32"), (0.1, 4, "bf16")],
)
def test_a_run_on_a_device_takes_the_plan_that_was_made(
    tmp_path: Path, max_vram_gb: float, micros: int, gradient_dtype: Any
) -> None:
    options = Options(max_ram_gb=1.0, max_vram_gb=max_vram_gb, gradient_dtype=gradient_dtype)
    training = Training(accumulate_grad_batches=micros, precision="32-true", options=options)
    planned = place(lay_out(on_meta(), training), training, NVLINK)
    link = DelayedLink()
    link.staging_bytes = PlannedLink.staging_bytes
    engine = attached(llama(), tmp_path / "pages", training, link)
    ran = engine.plan
    engine.detach()
    engine.machine.close()
    assert ran is not None
    assert planned.on_device is not None
    named = dataclasses.replace(planned.on_device, device=str(link.device))
    expected = dataclasses.replace(planned, directories=ran.directories, on_device=named)
    assert cast("Any", expected) == ran


@pytest.mark.parametrize("max_vram_gb", [0.0006, 0.0008, 0.002, 0.1])
def test_graphs_and_inputs_share_the_budget_of_the_device_as_in_a_run(max_vram_gb: float) -> None:
    found = plan(4, durability="step", layer_major=True, max_vram_gb=max_vram_gb)
    assert found.plan is not None
    assert found.tiers is not None
    there, tiers = found.plan.on_device, found.tiers
    assert there is not None
    inputs, saved = tiers.inputs, tiers.device.get("what units save", 0)
    assert inputs.near_bytes <= there.inputs_bytes
    assert saved + inputs.near_bytes <= max(there.graph_bytes, inputs.near_bytes)
    activations = tiers.device["activations of a unit"]
    assert tiers.device_bytes - activations <= max(there.limit_bytes, there.min_bytes)
    assert "inputs of units" not in tiers.disk
    assert tiers.ram.get("inputs of units", 0) <= inputs.away_bytes


def test_batches_run_in_groups_whose_inputs_find_room() -> None:
    sizes = {
        gb: plan(8, durability="step", layer_major=True, max_ram_gb=0.0642, max_vram_gb=gb)
        for gb in (0.0008, 0.1)
    }
    small, large = (found.tiers.inputs for found in sizes.values() if found.tiers is not None)
    assert (large.group, large.num_groups) == (8, 1)
    assert (small.group, small.num_groups) == (2, 4)
    assert sum(small.of_step(8)) == 8
    one, all_at_once = sizes[0.0008], sizes[0.1]
    assert one.time is not None
    assert all_at_once.time is not None
    assert sum(phase.times for phase in one.time.phases) == 2 * small.num_groups
    assert one.time.read_bytes >= all_at_once.time.read_bytes
    assert simulate(one).busy_s["compute"] >= simulate(all_at_once).busy_s["compute"]
