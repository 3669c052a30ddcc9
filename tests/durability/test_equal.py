"""With commits at checkpoints a run makes the bits of plain Lightning, under any budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from .nets import (
    LAYERS_BYTES,
    Make,
    Tiny,
    adamw,
    assert_same,
    fit,
    momentum,
    paged,
    smallest_gb,
)

KINDS: dict[str, tuple[Make, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "adamw": (adamw, {}, {}, {}),
    "momentum": (momentum, {}, {}, {}),
    "clipped": (adamw, {}, {}, {"gradient_clip_val": 0.5}),
    "accumulated": (adamw, {}, {}, {"accumulate_grad_batches": 2}),
    "tied": (adamw, {"tied": True}, {}, {}),
    "outside_units": (adamw, {"scaled": True}, {}, {}),
    "lossless": (adamw, {}, {"optimizer_compression": "lossless"}, {}),
}
# How much of the layers' weights, gradients and state has room beside what is needed anyway.
SLICE_BYTES = 16384
ROOM = {"nothing fits": 0.0, "half of the state fits": 3.0, "all fits": 4.0}


@functools.cache
def references(kind: str) -> tuple[Tiny, float]:
    """Return what plain Lightning makes of a kind, and the smallest budget for it."""
    make, net, paging, settings = KINDS[kind]
    plain = Tiny(make, **net)
    fit(plain, **settings)
    net_again = Tiny(make, **net)
    return plain, smallest_gb(net_again, trainer=settings, _slice_bytes=SLICE_BYTES, **paging)


def kinds_and_rooms() -> Iterator[Any]:
    """Yield every kind with every room; two of three run always."""
    for i, kind in enumerate(KINDS):
        for j, room in enumerate(ROOM):
            yield pytest.param(kind, room, marks=[pytest.mark.slow] if (i + j) % 3 == 2 else [])


@pytest.mark.parametrize(("kind", "room"), list(kinds_and_rooms()))
def test_bits_are_those_of_plain_lightning(kind: str, room: str) -> None:
    make, net, paging, settings = KINDS[kind]
    plain, smallest = references(kind)
    module, share = Tiny(make, **net), ROOM[room]
    if kind == "momentum":
        share *= 0.75  # one value of state for each weight, not two
    budget = smallest + share * LAYERS_BYTES / 2**30
    strategy = paged(max_ram_gb=budget, _slice_bytes=SLICE_BYTES, **paging)
    fit(module, strategy, **settings)
    assert module.losses == plain.losses
    assert_same(module, plain)
    plan = strategy.engine.plan
    assert plan.durability == "checkpoint"
    assert plan.keeps_weights == (share > 0)
    assert plan.in_ram == (room == "all fits")
    assert strategy.engine.stats.ram_peak_bytes <= budget * 2**30
