"""Training on a fake accelerator, under budgets that hold a unit or everything."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mt_lightning as mt
from mt_lightning.tiers.accelerator import AcceleratorLink
from mt_lightning.tiers.delayed import DelayedLink
from mt_lightning.tiers.link import Link

from ..graphs.nets import Net, assert_same, fit
from .fake import FakeDevice

GIB = 1 << 30
PIECE_BYTES = 20000
"""No multiple of a parameter's size, and several for a page."""
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 2},
}


class Scaled(Net):
    """Has a parameter and a buffer outside its units; the loop writes to the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x * self.scale.mean())

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.scale.mul_(0.999)


def fake_link(seed: int, device: type[FakeDevice] = FakeDevice) -> AcceleratorLink:
    """Make the link of an accelerator, on a device that is late."""
    return AcceleratorLink(device(seed), piece_bytes=PIECE_BYTES)


def link_of(kind: str, seed: int) -> Link:
    """Make a double of either kind."""
    return fake_link(seed) if kind == "accelerator" else DelayedLink(seed)


def paged(
    make: type[Net], mode: str, link: Link, root: Path, **options: Any
) -> tuple[Net, mt.MegaTrainStrategy]:
    """Train on a double of a device."""
    settings: dict[str, Any] = {"durability": "step", "max_ram_gb": 0.5, "recompute": True}
    strategy = mt.MegaTrainStrategy(_link=link, **{**settings, **options})
    module = make()
    fit(module, root, strategy, **MODES[mode])
    return module, strategy


@functools.cache
def reference(make: type[Net], mode: str) -> Net:
    """Train plainly."""
    module = make()
    with TemporaryDirectory() as root:
        fit(module, Path(root), **MODES[mode])
    return module


@functools.cache
def smallest_vram_gb(make: type[Net]) -> float:
    """Return the smallest device budget that the refusal of a smaller one names."""
    with TemporaryDirectory() as root, pytest.raises(mt.BudgetError) as refusal:
        paged(make, "eager", DelayedLink(), Path(root), max_vram_gb=1e-6)
    assert refusal.value.smallest_gb is not None
    assert re.search(r"max_vram_gb=\S+ is too small: unit \S+ needs", str(refusal.value))
    return refusal.value.smallest_gb


def check(make: type[Net], mode: str, link: Link, root: Path, **options: Any) -> Any:
    """Compare a run on a double with a plain one, bit by bit; return its statistics."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`training_step` returned `None`")
        module, strategy = paged(make, mode, link, root, **options)
    assert_same(module, reference(make, mode))
    for (name, a), b in zip(module.named_buffers(), reference(make, mode).buffers(), strict=True):
        assert torch.equal(a, b), name
    assert strategy.engine is not None
    return strategy.engine.stats
