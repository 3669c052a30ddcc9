"""The plan: the smallest budget, and what more memory is used for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mt_lightning.engine.build import Build, build_pages
from mt_lightning.engine.plan import GIB, Plan, make_plan
from mt_lightning.engine.units import find_units
from mt_lightning.errors import BudgetError
from mt_lightning.optim.codec import codec_for
from mt_lightning.pages.sizes import ALIGN_BYTES

WIDTHS = (64, 64, 96, 64)
PLANES = [-(-(w * w * 4 + w * 4 + 1) // ALIGN_BYTES) * ALIGN_BYTES for w in WIDTHS]
GRADS = [(w * w + w) * 4 for w in WIDTHS]
RESIDENT_NUMEL = 10
RING = 3 * 2 * max(PLANES)
STAGING = max(PLANES)
# The plane of the resident page, its state, and two of its gradients.
RESIDENT = 3 * ALIGN_BYTES + 2 * RESIDENT_NUMEL * 4
# What inputs of units are written through.
THROUGH = 2 * 4 * ALIGN_BYTES
SMALLEST = RING + STAGING + THROUGH + RESIDENT + PLANES[2] + GRADS[2]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(RESIDENT_NUMEL))
        self.layers = nn.ModuleList([nn.Linear(width, width) for width in WIDTHS])


def build(*, trains: bool = True) -> Build:
    root = Chain()
    optimizers = [torch.optim.AdamW(root.parameters())] if trains else []
    codecs = [codec_for(optimizer, False) for optimizer in optimizers]
    return build_pages(root, find_units(root), optimizers, {}, 1 << 20, codecs)


def plan(limit_bytes: int, **changes: Any) -> Plan:
    settings = {
        "directories": ["pages"],
        "schedule": "eager",
        "holds_grads": False,
        "trains": True,
        "in_memory": False,
    }
    settings.update(changes)
    return make_plan(build(trains=settings["trains"]), ram_limit_bytes=limit_bytes, **settings)


def test_the_smallest_budget() -> None:
    found = plan(SMALLEST)
    assert found.min_ram_bytes == SMALLEST
    assert found.largest_unit == "layers.2"
    assert (found.num_units, found.num_pages) == (4, 5)
    assert found.weight_bytes == sum(PLANES) + ALIGN_BYTES
    assert found.state_bytes == 2 * found.weight_bytes
    assert found.grad_bytes == sum(GRADS) + RESIDENT_NUMEL * 4
    assert found.disk_bytes == 2 * (found.weight_bytes + found.state_bytes)
    assert found.num_ring * found.ring_bytes == RING
    assert found.num_staging * found.staging_bytes == STAGING
    assert found.spilled == frozenset()
    assert found.cached_state_bytes == 0


@pytest.mark.parametrize("limit_bytes", [0, int(0.95 * SMALLEST), SMALLEST - 1])
def test_less_is_refused_and_a_budget_that_works_is_named(limit_bytes: int) -> None:
    with pytest.raises(BudgetError, match=r"unit layers\.2 needs .* MiB") as caught:
        plan(limit_bytes)
    smallest_gb = caught.value.smallest_gb
    assert f"max_ram_gb={smallest_gb:.6f}" in str(caught.value)
    assert SMALLEST <= smallest_gb * GIB < SMALLEST + 1.1e-6 * GIB
    assert plan(int(smallest_gb * GIB)).min_ram_bytes == SMALLEST


def test_files_in_memory_are_charged() -> None:
    on_disk = plan(1 << 30)
    in_memory = plan(1 << 30, in_memory=True)
    assert in_memory.min_ram_bytes - on_disk.min_ram_bytes == on_disk.disk_bytes


def test_without_training_only_weights_count() -> None:
    limit_bytes = max(PLANES) + ALIGN_BYTES
    found = plan(limit_bytes, trains=False, schedule="deferred", holds_grads=True)
    assert found.min_ram_bytes == limit_bytes
    assert found.schedule == "none"
    assert (found.state_bytes, found.num_ring, found.num_staging) == (0, 0, 0)
    assert found.spilled == frozenset()
    with pytest.raises(BudgetError):
        plan(limit_bytes - 1, trains=False)


def test_gradients_that_do_not_fit_are_spilled_the_first_units_first() -> None:
    kept = GRADS[3] + GRADS[1]
    # Page 0 is the resident one.
    for spare, spilled in [
        (0, {1, 2, 3, 4}),
        (GRADS[3] - 1, {1, 2, 3, 4}),
        (GRADS[3], {1, 2, 3}),
        (kept, {1, 3}),
        (sum(GRADS) - 1, {1}),
        (sum(GRADS), set()),
    ]:
        found = plan(SMALLEST + spare, holds_grads=True)
        assert found.spilled == spilled, spare
        assert found.spilled_bytes == sum(PLANES[index - 1] for index in spilled)
        assert plan(SMALLEST + spare, holds_grads=False).spilled == frozenset()


def test_state_stays_in_memory_when_all_weights_do() -> None:
    spare = sum(PLANES)
    resident = [(0, 0)]
    for more, cached in [
        (0, []),
        (2 * PLANES[0] - 1, []),
        (2 * PLANES[0], [(1, 0)]),
        (2 * sum(PLANES), [(1, 0), (2, 0), (3, 0), (4, 0)]),
    ]:
        found = plan(SMALLEST + spare + more)
        assert list(found.cached_state) == resident + cached, more
        assert found.cached_state_bytes == sum(2 * PLANES[page - 1] for page, _ in cached)


def test_what_a_step_moves() -> None:
    found = {spare: plan(SMALLEST + spare) for spare in (0, 20000, sum(PLANES), 4 * sum(PLANES))}
    reads = [each.read_bytes for each in found.values()]
    assert reads == sorted(reads, reverse=True)
    assert reads[0] > 2 * sum(PLANES), "all state, and weights that do not fit"
    assert reads[-1] == 0
    written_bytes = 3 * (sum(PLANES) + ALIGN_BYTES)
    assert {each.written_bytes for each in found.values()} == {written_bytes}
    once = plan(SMALLEST, holds_grads=True, schedule="deferred")
    # A spill that waits does not keep the weights of its page for the next forward, as an update.
    assert once.read_bytes == reads[0] + sum(PLANES) + PLANES[0]
    assert once.written_bytes == written_bytes + sum(PLANES)


def test_rows_name_every_place() -> None:
    found = plan(SMALLEST, holds_grads=True, schedule="deferred")
    rows = {item.strip(): size for item, size, _ in found.rows()}
    assert rows["weights"] == found.weight_bytes
    assert rows["optimizer state"] == found.state_bytes
    assert rows["gradients"] == found.grad_bytes
    assert rows["budget max_ram_gb"] == rows["smallest that works (layers.2)"] == SMALLEST
    assert found.spilled_bytes in rows.values()
    assert found.disk_bytes in rows.values()
