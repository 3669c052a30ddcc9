"""How long units compute on this machine: one of each kind is run on real tensors.

[Note: why a unit is run] Rates of large matrix products say little of small ones, of attention, or
of what lies between them. One unit of each kind is in memory at a time; its weights and inputs are
random. Between two runs the caches are emptied, as weights that come from a page are in none.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mt_lightning.engine.memory import ram_limit_bytes
from mt_lightning.engine.units import Unit
from mt_lightning.errors import BudgetError
from mt_lightning.planning.machines import GIB
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import Like, ModelWork, Sample
from mt_lightning.tiers.heap import keep_freed_memory

_CACHES_BYTES = 96 << 20
_NUM_RUNS = 5
_COPIES = 3
"""Weights, gradients, and as much for what is saved."""


def timed(model: Model, work: ModelWork, training: Training) -> ModelWork:
    """Return the work of a model with the seconds that its units take here.

    Args:
        model: The model.
        work: What its units compute; the executions in it are repeated.
        training: The settings.

    Raises:
        BudgetError: A unit does not fit in memory.
    """
    keep_freed_memory()  # as a run does
    units = list(work.units)
    junk = torch.zeros(_CACHES_BYTES // 4)
    for sample in work.samples:
        module = _real(model.units[sample.unit])
        forward_s, backward_s = _seconds(module, sample, training, junk)
        for index in sample.alike:
            units[index] = dataclasses.replace(
                units[index], forward_s=forward_s, backward_s=backward_s
            )
    return dataclasses.replace(work, units=tuple(units))


def _real(unit: Unit) -> nn.Module:
    """Return a copy in memory; values are random, and small enough to stay finite."""
    needed = _COPIES * sum(p.numel() * p.element_size() for p in unit.module.parameters())
    free = ram_limit_bytes(None)
    if needed > free:
        raise BudgetError(
            f"unit {unit.name} cannot be timed: with gradients and what it saves it takes about "
            f"{needed / GIB:.1f} GiB in memory, and {free / GIB:.1f} GiB are free. Plan without "
            "--time-units, by the rates of the profile."
        )
    made = copy.deepcopy(unit.module).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
            else:
                tensor.zero_()
    return made


def _seconds(
    module: nn.Module, sample: Sample, training: Training, junk: Tensor
) -> tuple[float, float]:
    """Return the seconds of forward and of backward."""
    args, kwargs = tree_map(_tensor, (sample.args, sample.kwargs))
    autocast = torch.autocast(
        "cpu", torch.bfloat16, enabled=training.dtype == "bfloat16", cache_enabled=False
    )
    forwards, backwards = [], []
    with torch.enable_grad(), autocast:
        for number in range(_NUM_RUNS + 1):
            junk.add_(1)
            begin = time.perf_counter()
            out = module(*args, **kwargs)
            middle = time.perf_counter()
            results = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            above = [torch.full_like(t, 1e-3) for t in results]
            start = time.perf_counter()
            if results:
                torch.autograd.backward(results, above)
            end = time.perf_counter()
            module.zero_grad()
            del out, results, above
            if number:  # the first one warms up
                forwards.append(middle - begin)
                backwards.append(end - start)
    return statistics.median(forwards), statistics.median(backwards)


def _tensor(value: Any) -> Any:
    if not isinstance(value, Like):
        return value
    if not value.dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=value.dtype)
    made = torch.randn(value.shape, dtype=value.dtype)
    return made.requires_grad_(value.requires_grad)
