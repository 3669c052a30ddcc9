"""On a device that is late and out of order, every bit is that of plain Lightning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

import mt_lightning as mt
from mt_lightning.tiers.accelerator import AcceleratorLink
from mt_lightning.tiers.device import TorchDevice

from ..graphs.nets import (
    Detached,
    Dropped,
    Frozen,
    Interleaved,
    Net,
    Shared,
    Twice,
    assert_same,
    fit,
)
from .fake import FakeDevice
from .runs import GIB, MODES, PIECE_BYTES, Scaled, check, link_of, smallest_vram_gb

SOME = [Net, Scaled, Shared, Frozen, Dropped, Interleaved, Detached, Twice]


@pytest.mark.parametrize("seed", range(12))
def test_every_order_trains_the_same_weights(seed: int, tmp_path: Path) -> None:
    one_of_many(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_orders_train_the_same_weights(part: int, tmp_path: Path) -> None:
    for seed in range(50 * part, 50 * (part + 1)):
        one_of_many(seed, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_late_links_train_the_same_weights(part: int, tmp_path: Path) -> None:
    for seed in range(50 * part, 50 * (part + 1)):
        one_of_many(seed, tmp_path / str(seed), "delayed")


def one_of_many(seed: int, root: Path, kind: str | None = None) -> None:
    """Train one net in one way, with a budget between the smallest and one that holds all."""
    dice = random.Random(seed)
    make, mode = SOME[seed % len(SOME)], list(MODES)[seed // 3 % len(MODES)]
    if make is Twice:
        mode = "eager"
    drawn = "delayed" if dice.random() < 0.3 else "accelerator"
    smallest = smallest_vram_gb(make)
    if make is Interleaved:
        smallest *= 8  # autograd holds a part of each gradient while it goes to and fro
    options: dict[str, Any] = {
        "recompute": dice.choice([True, "auto"]),
        "max_vram_gb": smallest * dice.choice([1.0, 1.1, 1.5, 3.0, 20.0]),
        "_depth": dice.choice([None, 0, 2]),
    }
    stats = check(make, mode, link_of(kind or drawn, seed), root, **options)
    assert stats.bytes_uploaded > 0
    assert stats.bytes_downloaded > 0
    assert 0 < stats.vram_peak_bytes <= options["max_vram_gb"] * GIB


class Threaded(FakeDevice):
    """Copies of the host run on the threads that a real device gets."""

    def lane(self, what: str) -> Any:
        return TorchDevice.lane(self, what)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_threads_train_the_same_weights(seed: int, mode: str, tmp_path: Path) -> None:
    link = AcceleratorLink(Threaded(seed), piece_bytes=PIECE_BYTES)
    max_vram_gb = smallest_vram_gb(Scaled) * (1.2 if seed else 4.0)
    check(Scaled, mode, link, tmp_path, max_vram_gb=max_vram_gb, recompute="auto")


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_weights_get_the_masters_they_get_on_the_host(mode: str, tmp_path: Path) -> None:
    def train(link: Any, **options: Any) -> Scaled:
        module = Scaled()
        strategy = mt.MegaTrainStrategy(
            durability="step", max_ram_gb=0.5, layer_major=False, _link=link, **options
        )
        fit(module, tmp_path, strategy, precision="bf16-true", **MODES[mode])
        return module

    expected = train(None)
    for seed in range(2):
        max_vram_gb = smallest_vram_gb(Scaled) * (0.7 if seed else 4.0)
        assert_same(train(link_of("accelerator", seed), max_vram_gb=max_vram_gb), expected)


def test_scaled_losses_train_the_same_weights(tmp_path: Path) -> None:
    def train(**strategy: Any) -> Scaled:
        module, scaler = Scaled(), torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        paged = mt.MegaTrainStrategy(max_ram_gb=0.5, **strategy) if strategy else "auto"
        fit(module, tmp_path, paged, plugins=plugins, gradient_clip_val=0.1)
        return module

    expected = train()
    for seed in range(2):
        max_vram_gb = smallest_vram_gb(Scaled) * (1.2 if seed else 20.0)
        link = link_of("accelerator", seed)
        assert_same(train(_link=link, max_vram_gb=max_vram_gb), expected)


@pytest.mark.parametrize("kind", ["accelerator", "delayed"])
def test_the_smallest_budget_works_and_is_used_up(kind: str, tmp_path: Path) -> None:
    smallest = smallest_vram_gb(Net)
    stats = check(Net, "eager", link_of(kind, 1), tmp_path, max_vram_gb=smallest)
    assert smallest * GIB - 1100 <= stats.vram_peak_bytes <= smallest * GIB


def test_layers_are_brought_ahead_of_their_use(tmp_path: Path) -> None:
    stats = check(Net, "eager", link_of("accelerator", 1), tmp_path, max_vram_gb=0.1)
    assert stats.uploads_ahead > 0
