"""The run in virtual time takes the bytes that the independent simulator of the tests takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from mt_lightning.commands.plan.model import find_model, worker_for
from mt_lightning.engine.options import Options
from mt_lightning.planning.machines import GIB, changed, find_machine
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.simulation import simulate
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import estimate_work
from tests.bytes.simulator import Case, Simulator, Sizes

WIDTH, DEPTH = 512, 6


def stack(budget_bytes: int, *, clips: bool, micros: int) -> Answer:
    """Plan a stack of linear layers that receive nothing that counts."""
    with torch.device("meta"):
        model = Model.of("stack", nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    training = Training(
        accumulate_grad_batches=micros,
        clips_norm=clips,
        options=Options(
            max_ram_gb=budget_bytes / GIB, layer_major=False, recompute=True, durability="step"
        ),
    )
    work = estimate_work(model.units, 1, "")
    bare = tuple(dataclasses.replace(w, input_bytes=0, saved_bytes=0) for w in work.units)
    bare_work = dataclasses.replace(work, units=bare)
    found = answer(model, training, find_machine("dgx-spark"), lambda _: bare_work)
    assert found.fits, found.lacks
    return found


def case_of(found: Answer, *, clips: bool, micros: int) -> Case:
    assert found.build is not None
    assert found.plan is not None
    pages = [
        Sizes(
            weight_bytes=page.layout.nbytes,
            grad_bytes=page.layout.grad_bytes,
            chunk_bytes=tuple(chunk.nbytes for chunk in page.state_layout.chunks),
        )
        for page in found.build.table
    ]
    return Case(
        units=tuple(pages),
        resident=Sizes(weight_bytes=0, grad_bytes=0, chunk_bytes=()),
        budget_bytes=found.plan.ram_limit_bytes,
        depth=64,
        deferred=clips,
        micro_batches=micros,
    )


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("frames", [2.2, 5.0, 8.0])
def test_runs_move_the_bytes_that_the_independent_simulator_says(
    frames: float, micros: int, clips: bool
) -> None:
    page_bytes = 4 * WIDTH * (WIDTH + 1)
    smallest = 10 * page_bytes
    budget = int(smallest + frames * page_bytes)
    found = stack(budget, clips=clips, micros=micros)
    case = case_of(found, clips=clips, micros=micros)
    marks = list(Simulator(case).run(6))
    ends = [mark for number, mark in enumerate(marks) if number % micros == micros - 1]
    per_step = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(ends[2:5], ends[3:6], strict=True)]
    found_bytes = simulate(found, num_warm=3, num_steps=3)
    assert found_bytes.written_bytes == pytest.approx(sum(w for _, w in per_step) / 3, rel=0.001)
    assert found_bytes.read_bytes == pytest.approx(sum(r for r, _ in per_step) / 3, rel=0.001)


def test_gradients_that_find_no_room_go_to_disk_as_in_a_run() -> None:
    found = stack(12 * 4 * WIDTH * (WIDTH + 1), clips=True, micros=2)
    assert found.plan is not None
    assert found.plan.spilled
    unforeseen = dataclasses.replace(
        found, plan=dataclasses.replace(found.plan, spilled=frozenset())
    )
    planned, played = simulate(found), simulate(unforeseen)
    assert played.ram_peak_bytes <= found.plan.ram_limit_bytes
    state_and_weights = found.plan.state_bytes + found.plan.weight_bytes
    assert played.written_bytes > state_and_weights
    assert played.written_bytes == pytest.approx(planned.written_bytes, rel=0.25)


def hundred(micros: int) -> Answer:
    """Plan 100B on an H200 with four PCIe 5 drives, in batches of 2,048 tokens."""
    model, machine = find_model("100B"), find_machine("h200")
    options = Options(optimizer_compression=True, layer_major=True)
    training = Training(sequence_length=2048, accumulate_grad_batches=micros, options=options)
    return answer(model, training, machine, worker_for(model), advises=False)


@pytest.fixture(scope="module")
def busy() -> Answer:
    """Plan a batch that computing sets the time of."""
    return hundred(20)


def test_with_a_large_batch_the_device_computes_nearly_all_the_time(busy: Answer) -> None:
    played = simulate(busy, num_steps=2)
    assert busy.plan is not None
    assert played.compute_share >= 0.95
    assert played.ram_peak_bytes <= busy.plan.ram_limit_bytes
    assert busy.time is not None
    assert played.step_s == pytest.approx(busy.time.seconds, rel=0.05)


def test_a_page_is_stepped_while_the_one_before_is_written_to_other_drives() -> None:
    # 63 % if each page waited for the last byte of the one before; 82 % if planes of pages that are
    # updated one after the other shared their drives by chance.
    assert simulate(hundred(12), num_steps=2).compute_share >= 0.9


def test_without_overlap_a_step_takes_the_sum_of_its_parts(busy: Answer) -> None:
    played, alone = simulate(busy, num_steps=1), simulate(busy, num_steps=1, overlaps=False)
    assert alone.step_s > 1.3 * played.step_s
    slow = dataclasses.replace(busy, machine=changed(busy.machine, drive_write_bytes_per_s=1e9))
    assert simulate(slow, num_steps=1).step_s > 2 * played.step_s


def test_spans_of_one_part_never_overlap(busy: Answer) -> None:
    spans = simulate(busy, num_steps=1, records=True).spans
    for part in ("compute", "update", "link up", "link down"):
        mine = sorted((begin, end) for where, _, begin, end in spans if where == part)
        assert mine
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:], strict=False))
