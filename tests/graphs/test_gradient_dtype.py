"""gradient_dtype="bf16": the bits of a loop that rounds each gradient as it arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mt_lightning as mt

from ..accelerator.runs import link_of, smallest_vram_gb
from .nets import NUM_STEPS, Net, assert_same, fit, smallest_gb


class Rounding(Net):
    """Rounds what arrives at each parameter, and then the sum, as a bfloat16 sum is rounded."""

    def on_fit_start(self) -> None:
        for param in self.parameters():
            param.register_hook(rounded)

    def on_after_backward(self) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.grad = rounded(param.grad)


def rounded(grad: Tensor) -> Tensor:
    return grad.bfloat16().float()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 2, "gradient_clip_val": 0.1},
}


ALWAYS = {("roomy", "accumulated"), ("tight", "norm"), ("device", "plain")}
PLACES = [
    pytest.param(where, way, marks=[] if (where, way) in ALWAYS else [pytest.mark.slow])
    for where in ("roomy", "tight", "device")
    for way in WAYS
]


@pytest.mark.parametrize(("where", "way"), PLACES)
def test_bits_are_those_of_a_loop_that_rounds(where: str, way: str, tmp_path: Path) -> None:
    expected, module, exact = Rounding(), Net(), Net()
    fit(expected, tmp_path / "plain", **WAYS[way])
    options: dict[str, Any] = {"max_ram_gb": 0.5, "durability": "step"}
    options["layer_major"] = where == "roomy" and way == "accumulated"
    if where == "tight":
        options["max_ram_gb"] = smallest_gb(Net, tmp_path / "tried", durability="step")
    if where == "device":
        options["max_vram_gb"] = 1.4 * smallest_vram_gb(Net)
    strategy: dict[str, Any] = {}
    for dtype, trained in (("bf16", module), ("fp32", exact)):
        link = link_of("accelerator", 3) if where == "device" else None
        strategy[dtype] = mt.MegaTrainStrategy(gradient_dtype=dtype, _link=link, **options)
        fit(trained, tmp_path / dtype, strategy[dtype], **WAYS[way])
    assert_same(module, expected)
    pairs = zip(module.parameters(), exact.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in pairs)
    left = {dtype: each.engine.stats.bytes_downloaded for dtype, each in strategy.items()}
    assert left["fp32"] == 2 * left["bf16"], "half the bytes leave the device"
    assert bool(left["bf16"]) == (where == "device")


def test_masters_take_them_as_they_are(tmp_path: Path) -> None:
    """Their gradients are bfloat16 anyway."""
    nets = {}
    for dtype in ("fp32", "bf16"):
        nets[dtype] = Net()
        strategy = mt.MegaTrainStrategy(max_ram_gb=0.5, gradient_dtype=dtype)
        fit(nets[dtype], tmp_path / dtype, strategy, precision="bf16-true", max_steps=NUM_STEPS)
    assert_same(nets["bf16"], nets["fp32"])
