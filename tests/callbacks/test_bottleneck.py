"""The advice names what takes the most time, and a setting that would move it, with its limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mt_lightning.callbacks.bottleneck import Situation, advise
from mt_lightning.callbacks.meter import StepRecord
from mt_lightning.engine.plan import Plan

GIB = 1 << 30

PLAN = Plan(
    num_units=4, num_pages=4, num_params=1, weight_bytes=4 * GIB, state_bytes=8 * GIB,
    grad_bytes=4 * GIB, largest_unit="u", min_ram_bytes=GIB, ram_limit_bytes=6 * GIB, disk_bytes=0,
    schedule="eager", directories=["."], ring_bytes=0, num_ring=0, staging_bytes=0, num_staging=0,
    sweep_bytes=4 * GIB,
)  # fmt: skip
AT = Situation(
    plan=PLAN, free_bytes=8 * GIB, accumulate=1, num_workers=0, compresses=False, has_fused=False,
    units_kept=0, units_run=4, graph_bytes=0,
)  # fmt: skip
DURABLE = dataclasses.replace(PLAN, durability="checkpoint", sweep_bytes=0)


def record(**values: Any) -> StepRecord:
    fields = {field.name: 0 for field in dataclasses.fields(StepRecord)}
    times = {"wall_s": 4.0, "compute_s": 1.0, "read_bytes": 8 * GIB, "written_bytes": 12 * GIB}
    return StepRecord(**{**fields, **times, **values})


@pytest.mark.parametrize(
    ("values", "at", "bottleneck", "share", "setting"),
    [
        (
            {"stall_read_s": 1.0, "stall_update_s": 2.0, "behind_read_s": 1.0},
            {},
            "drive reads", 0.5,
            "max_ram_gb=6 -> 8 keeps all weights in RAM: saves up to 1 s a step.",
        ),
        (
            {"stall_read_s": 2.0},
            {"free_bytes": GIB, "accumulate": 4},
            "drive reads", 0.5,
            "layer_major=True reads weights once for 4 batches: saves up to 2 s a step.",
        ),
        (
            {"stall_read_s": 2.0},
            {"free_bytes": GIB},
            "drive reads", 0.5,
            "optimizer_compression='lossless' reads and writes 1/6 less of optimizer state, bit "
            "for bit the same: saves up to 0.33 s a step.",
        ),
        (
            {"stall_read_s": 2.0},
            {"plan": DURABLE},
            "drive reads", 0.5,
            "max_ram_gb=6 -> 14 keeps optimizer state in RAM: saves up to 2 s a step.",
        ),
        (
            {"stall_write_s": 1.0, "stall_memory_s": 1.5, "behind_write_s": 1.5},
            {"plan": dataclasses.replace(PLAN, sweep_bytes=0)},
            "drive writes", 0.625,
            "durability='checkpoint' writes what fits in RAM every five minutes instead of every "
            "step: saves up to 0.83 s a step.",
        ),
        (
            {"stall_write_s": 2.5},
            {"plan": DURABLE, "compresses": True},
            "drive writes", 0.625,
            "accumulate_grad_batches=4 writes the same bytes for 4 times the tokens; it makes the "
            "batch of a step larger.",
        ),
        (
            {"stall_update_s": 2.0, "behind_read_s": 0.5},
            {"has_fused": True},
            "update", 0.375,
            "the optimizer's fused=True does the same arithmetic in one pass (it may round "
            "differently): saves up to 1.5 s a step.",
        ),
        (
            {"stall_memory_s": 2.0},
            {},
            "memory", 0.5,
            "max_ram_gb=6 -> 10 lets a unit run while those before it are updated: saves up to 2 s "
            "a step.",
        ),
        (
            {"compute_s": 3.0, "recompute_s": 1.0, "wall_s": 3.5},
            {"units_kept": 2, "graph_bytes": 2 * GIB},
            "compute", 3 / 3.5,
            "max_ram_gb=6 -> 8 keeps what units save for backward instead of running them again: "
            "saves up to 1 s a step.",
        ),
        (
            {"compute_s": 3.6, "stall_read_s": 0.4},
            {},
            "compute", 0.9,
            "No setting of paging would move it: all of paging takes 10% of a step.",
        ),
        (
            {"between_s": 2.5},
            {},
            "host code", 0.75,
            "DataLoader(num_workers=1) loads batches meanwhile: saves up to 2.5 s a step.",
        ),
        (
            {"between_s": 1.0},
            {},
            "host code", 0.75,
            "Trainer(profiler='simple') names the hook, callback or logger that takes it.",
        ),
    ],
)  # fmt: skip
def test_advice(
    values: dict[str, Any], at: dict[str, Any], bottleneck: str, share: float, setting: str
) -> None:
    advice = advise([record(**values)] * 2, dataclasses.replace(AT, **at))
    assert (advice.bottleneck, advice.setting) == (bottleneck, setting)
    assert advice.share == pytest.approx(share)
    assert advice.text.startswith(f"Bottleneck: {bottleneck} (")


def test_an_update_that_training_does_itself_is_no_wait_for_the_drive() -> None:
    # The worker waited for reads for longer than training waited for anything.
    advice = advise([record(stall_update_s=3.0, behind_read_s=6.0)], AT)
    assert (advice.bottleneck, advice.share) == ("drive reads", 0.75)
