"""gradient_dtype="bf16": the bits of a loop that rounds each gradient as it arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mt_lightning as mt

from ..accelerator.runs import link_of, smallest_vram_gb
from .nets import NUM_STEPS, WIDTH, Block, Net, assert_same, fit, smallest_gb


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
    return grad.bfloat16().to(grad.dtype)


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
        options["max_ram_gb"] = smallest_gb(
            Net, tmp_path / "tried", durability="step", gradient_dtype="bf16"
        )
    if where == "device":
        options["max_vram_gb"] = 1.4 * smallest_vram_gb(Net)
    strategy: dict[str, Any] = {}
    runs: tuple[tuple[Any, Net], ...] = (("bf16", module), ("fp32", exact))
    for dtype, trained in runs:
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


class Whole(Net):
    """Its optimizer needs whole tensors, which come back from disk in ranges."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


class RoundingWhole(Rounding, Whole):
    pass


class Mixed(Net):
    """A page of it has weights of two dtypes."""

    class block(Block):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.low(x.bfloat16()).float())


class RoundingMixed(Rounding, Mixed):
    pass


@pytest.mark.parametrize(
    ("paged", "plain", "slices"),
    [
        (Net, Rounding, 4096),
        (Net, Rounding, 24576),
        (Whole, RoundingWhole, 4096),
        (Mixed, RoundingMixed, 24576),
    ],
)
def test_what_waits_on_disk_takes_half(
    paged: type[Net], plain: type[Net], slices: int, tmp_path: Path
) -> None:
    way: dict[str, Any] = {**WAYS["accumulated"], "max_steps": 2}
    common: dict[str, Any] = {"durability": "step", "_slice_bytes": slices}
    gb = {
        dtype: smallest_gb(paged, tmp_path / f"tried {dtype}", gradient_dtype=dtype, **common)
        for dtype in ("fp32", "bf16")
    }
    plans, written, nets = {}, {}, {}
    dtype: Any
    for dtype in gb:
        nets[dtype] = paged()
        strategy = mt.MegaTrainStrategy(max_ram_gb=gb[dtype], gradient_dtype=dtype, **common)
        fit(nets[dtype], tmp_path / dtype, strategy, **way)
        assert strategy.engine is not None
        plans[dtype] = strategy.engine.plan
        written[dtype] = strategy.engine.stats.bytes_written
        assert strategy.engine.stats.ram_peak_bytes <= gb[dtype] * 2**30
    expected = plain()
    fit(expected, tmp_path / "plain", **way)
    assert_same(nets["bf16"], expected)
    whole, half = plans["fp32"], plans["bf16"]
    assert whole is not None
    assert half is not None
    assert half.spilled
    assert half.spilled == whole.spilled
    if paged is Mixed:
        assert half.grad_bytes < whole.grad_bytes
        assert written["fp32"] == written["bf16"], "such a page is written as it is"
        return
    assert half.grad_bytes * 2 == whole.grad_bytes
    if slices == 4096 and paged is Net:
        return  # half a block is written as a block
    spared = whole.spilled_bytes - half.spilled_bytes
    assert spared > 0.4 * whole.spilled_bytes
    spills = way["max_steps"] * way["accumulate_grad_batches"]
    assert written["fp32"] - written["bf16"] == spills * spared


ROUNDED_NUMEL = 34000
"""A little more than a unit has."""


def test_more_gradients_stay_in_ram(tmp_path: Path) -> None:
    spilled = {}
    for dtype in ("fp32", "bf16"):
        common: dict[str, Any] = {"durability": "step", "gradient_dtype": dtype}
        gb = smallest_gb(Net, tmp_path / f"tried {dtype}", **common)
        strategy = mt.MegaTrainStrategy(max_ram_gb=gb + 2 * ROUNDED_NUMEL / 2**30, **common)
        fit(Net(), tmp_path / dtype, strategy, gradient_clip_val=0.1)
        assert strategy.engine is not None
        assert strategy.engine.plan is not None
        spilled[dtype] = len(strategy.engine.plan.spilled)
    assert spilled["bf16"] == spilled["fp32"] - 1
