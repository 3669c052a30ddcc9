"""bf16-true on pages is the loop with fp32 masters, bit for bit, whatever the run is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mt_lightning import BudgetError

from .reference import Reference, assert_same, fit, make_net, paged

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "amsgrad": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9),
    "adafactor": lambda net: torch.optim.Adafactor([p for p in net.parameters() if p.numel()]),
    "adagrad": lambda net: torch.optim.Adagrad([p for p in net.parameters() if p.numel()]),
}
RUNS: dict[str, dict[str, Any]] = {
    "eager": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 3, "max_steps": 4},
    "accumulated, norm": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "max_steps": 4,
    },
}
PAGING: dict[str, dict[str, Any]] = {
    "each step": {"durability": "step"},
    "in RAM": {"durability": "checkpoint"},
    "lossless": {"durability": "step", "optimizer_compression": "lossless"},
}


def smallest(make: Any, run: dict[str, Any], paging: dict[str, Any]) -> float:
    with pytest.raises(BudgetError) as refusal:
        fit(make_net(make), paged(**{**paging, "max_ram_gb": 1e-5}), **run)
    assert refusal.value.smallest_gb is not None
    return refusal.value.smallest_gb


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer(kind: str) -> None:
    make = OPTIMIZERS[kind]
    expected = Reference(make_net(make)).fit()
    net = make_net(make)
    tight = {"durability": "step", "max_ram_gb": smallest(make, {}, {"durability": "step"})}
    assert_same(expected, net, fit(net, paged(**tight)).optimizers[0])


def runs_and_pagings() -> Iterator[Any]:
    """Yield every run with every way to page; two of three always."""
    for i, run in enumerate(RUNS):
        for j, paging in enumerate(PAGING):
            marks = [pytest.mark.slow] if (i + j) % 3 == 2 else []
            yield pytest.param(run, paging, marks=marks)


@pytest.mark.parametrize(("run", "paging"), list(runs_and_pagings()))
def test_every_run(run: str, paging: str) -> None:
    make = OPTIMIZERS["adamw"]
    expected = Reference(make_net(make)).fit(**RUNS[run])
    net = make_net(make)
    assert_same(expected, net, fit(net, paged(**PAGING[paging]), **RUNS[run]).optimizers[0])


@pytest.mark.parametrize("run", RUNS)
def test_the_smallest_budget(run: str) -> None:
    make = OPTIMIZERS["fused"]
    expected = Reference(make_net(make)).fit(**RUNS[run])
    net = make_net(make)
    gb = smallest(make, RUNS[run], {"durability": "step"})
    strategy = paged(durability="step", max_ram_gb=gb)
    assert_same(expected, net, fit(net, strategy, **RUNS[run]).optimizers[0])
    assert strategy.engine is not None
    assert strategy.engine.stats.ram_peak_bytes <= gb * (1 << 30)


@pytest.mark.parametrize("run", ["eager", "norm"])
def test_tied_weights(run: str) -> None:
    make = OPTIMIZERS["adamw"]
    expected = Reference(make_net(make, tied=True)).fit(**RUNS[run])
    net = make_net(make, tied=True)
    assert_same(expected, net, fit(net, paged(durability="step"), **RUNS[run]).optimizers[0])


@pytest.mark.parametrize("layer_major", [True, "auto"])
def test_batches_unit_by_unit(layer_major: Any) -> None:
    make, run = OPTIMIZERS["adamw"], RUNS["accumulated, norm"]

    expected = Reference(make_net(make, dropout=False)).fit(**run)
    net = make_net(make, dropout=False)
    gb = 1.05 * smallest(make, run, {"durability": "step"})
    strategy = paged(durability="step", max_ram_gb=gb, layer_major=layer_major)
    assert_same(expected, net, fit(net, strategy, **run).optimizers[0])
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    if layer_major is True:
        assert strategy.engine.plan.order == "layer-major"


def test_the_weights_of_a_page_take_two_bytes_per_parameter() -> None:
    net = make_net(OPTIMIZERS["adamw"])
    strategy = paged(durability="step")
    fit(net, strategy)
    assert strategy.engine is not None
    plan = strategy.engine.plan
    assert plan is not None
    numel = sum(p.numel() for p in net.parameters())
    assert 2 * numel <= plan.weight_bytes < 2 * numel + 4096 * plan.num_pages + 64 * 50
    assert plan.rest_bytes == 2 * numel
    assert plan.grad_bytes == 2 * numel
    (row,) = [row for row in plan.rows() if "masters" in row[0]]
    assert row[1] == plan.rest_bytes
