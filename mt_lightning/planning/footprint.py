"""Training in memory against training on pages: what each item takes, and where.

[Note: what is compared] "In memory" is what a program holds that keeps everything in the memory of
its accelerators: weights, gradients, the state of the optimizer, and what autograd saves with
checkpointing of every layer. In bf16 it has bf16 weights and gradients, and fp32 masters with the
optimizer, as mixed precision usually has. On pages, bf16-mixed means that products are computed in
bf16; the weights on pages are the fp32 masters themselves. With bf16-true the weights on pages are
bf16 as well, and what the masters have beside them lies with the optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass

from mt_lightning.engine.build import Build
from mt_lightning.planning.planner import Answer
from mt_lightning.planning.training import Training

_HALF_BYTES, _FULL_BYTES = 2, 4


@dataclass(frozen=True)
class Item:
    """One item of memory, in bytes.

    Attributes:
        name: What it is.
        in_memory: What training in memory holds.
        device: What ours holds on the device, or in RAM beside the budget where the host computes.
        ram: What the budget counts.
        disk: What lies on the drives, slots included.
    """

    name: str
    in_memory: int
    device: int
    ram: int
    disk: int


def footprint(found: Answer) -> list[Item]:
    """Return the items of a run that fits, and their sum as the last one.

    Args:
        found: The answer; its precision decides what training in memory holds.
    """
    assert found.build is not None
    assert found.plan is not None
    assert found.tiers is not None
    assert found.work is not None
    build, tiers, work = found.build, found.tiers, found.work
    held = _in_memory(build, found.training)
    live = max(w.live_bytes for w in work.units)
    inputs = sum(w.input_bytes for w in work.units)
    device, ram, disk = dict(tiers.device), dict(tiers.ram), dict(tiers.disk)
    at_work = ram.pop("the largest unit, with gradients", 0)
    unit_grads = max(
        (sum(build.table[i].layout.grad_bytes for i in u.pages) for u in build.units), default=0
    )
    unit_grads = min(unit_grads, at_work)
    streams = ram.pop("frames that state streams through", 0)
    activations = sum(
        device.pop(item, 0)
        for item in ("activations of a unit", "what units save", "inputs of units")
    )
    items = [
        Item(
            "weights",
            held["weights"],
            device.pop("weights of units", 0) + device.pop("weights", 0),
            at_work - unit_grads + ram.pop("weights of further units", 0),
            disk.pop("weights, two slots", 0),
        ),
        Item(
            "gradients",
            held["gradients"],
            device.pop("gradients of a unit", 0) + device.pop("gradients", 0),
            unit_grads + ram.pop("gradients", 0),
            disk.pop("spilled gradients", 0),
        ),
        Item(
            "optimizer state",
            held["optimizer state"],
            device.pop("optimizer state", 0),
            streams + ram.pop("optimizer state", 0),
            disk.pop("optimizer state, two slots", 0),
        ),
        Item(
            "activations",
            inputs + live,
            activations or tiers.ram_beside_bytes,
            ram.pop("inputs of units", 0) + ram.pop("what units save", 0),
            disk.pop("inputs of units", 0),
        ),
    ]
    assert not {**device, **ram}, (device, ram)
    total = Item("sum", *(sum(getattr(i, n) for i in items) for n in _COLUMNS))
    return [*items, total]


_COLUMNS = ("in_memory", "device", "ram", "disk")


def _in_memory(build: Build, training: Training) -> dict[str, int]:
    """Return what training in memory holds, activations apart."""
    params = sum(spec.numel for page in build.table for spec in page.layout.params)
    trained = [page for page in build.table if page.layout.optimizer is not None]
    numel = sum(spec.numel for page in trained for spec in page.layout.params)
    state = numel * _state_values(training.optimizer) * _FULL_BYTES
    if training.dtype == "bfloat16":
        masters = numel * _FULL_BYTES
        return {
            "weights": params * _HALF_BYTES,
            "gradients": numel * _HALF_BYTES,
            "optimizer state": state + masters,
        }
    return {
        "weights": params * _FULL_BYTES,
        "gradients": numel * _FULL_BYTES,
        "optimizer state": state,
    }


def _state_values(optimizer: str) -> int:
    return {"adamw": 2, "adam": 2, "sgd-momentum": 1}.get(optimizer, 0)
