"""Runs under the default `layer_major="auto"`, with a budget that makes it matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mt_lightning import MegaTrainStrategy
from mt_lightning.errors import BudgetError

from .run import Batch, assert_same, fit

_SMALLEST: dict[Any, float] = {}
_MATTERS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision")


def tight_gb(
    directory: Path,
    make: Callable[[], nn.Module],
    batches: list[Batch],
    room_mib: float = 0.25,
    paging: dict[str, Any] | None = None,
    **settings: Any,
) -> float:
    """Return the smallest budget of layer-major order, and room for the inputs of units."""
    settings = {name: settings[name] for name in _MATTERS if name in settings}
    if (key := (make, repr(paging), repr(settings))) not in _SMALLEST:
        strategy = MegaTrainStrategy(**{**(paging or {}), "layer_major": True, "max_ram_gb": 1e-5})
        with pytest.raises(BudgetError) as refusal:
            fit(directory, make, batches, strategy, **settings)
        assert refusal.value.smallest_gb is not None
        _SMALLEST[key] = refusal.value.smallest_gb
    return _SMALLEST[key] + room_mib / 1024


def fit_auto(
    directory: Path,
    make: Callable[[], nn.Module],
    batches: list[Batch] | Callable[[], list[Batch]],
    *,
    room_mib: float = 0.25,
    paging: dict[str, Any] | None = None,
    prepare: Callable[[], None] = lambda: None,
    **settings: Any,
) -> tuple[dict[str, Any], MegaTrainStrategy]:
    """Train; return the outcome and the strategy, whose engine tells what was decided."""
    take = batches if callable(batches) else lambda: batches
    max_ram_gb = tight_gb(directory, make, take(), room_mib, paging=paging, **settings)
    strategy = MegaTrainStrategy(**{"max_ram_gb": max_ram_gb, **(paging or {})})
    prepare()
    found = fit(directory, make, take(), strategy, **settings)
    assert strategy.engine is not None
    assert strategy.engine.stats.ram_peak_bytes <= max_ram_gb * 2**30
    return found, strategy


def check_auto(
    directory: Path, make: Callable[[], nn.Module], batches: list[Batch], **settings: Any
) -> MegaTrainStrategy:
    """Compare with plain Lightning, bit for bit; return the strategy."""
    plain = {k: v for k, v in settings.items() if k not in ("paging", "room_mib")}
    expected = fit(directory, make, batches, None, **plain)
    found, strategy = fit_auto(directory, make, batches, **settings)
    assert_same(expected, found)
    return strategy


def order_of(strategy: MegaTrainStrategy) -> tuple[str, str]:
    """Return in which order batches run, and why."""
    assert strategy.engine is not None
    assert strategy.engine.plan is not None
    return strategy.engine.plan.order, strategy.engine.plan.order_reason
