"""16-mixed: the bits, the scales and the skipped steps of plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

import mt_lightning as mt

from .nets import Net, assert_same, fit, smallest_gb


def halves(**settings: Any) -> MixedPrecision:
    """Return Lightning's plugin, which on a CPU has to be given as an object."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=2, **settings)  # pyright: ignore[reportPrivateImportUsage]
    return MixedPrecision("16-mixed", "cpu", scaler)


class Overflowing(Net):
    """The gradients of its second batch are infinite in fp16; the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        return loss * 1e36 if batch_idx == 1 else loss

    def on_train_batch_end(self, *args: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else plugin._scale.scaler
        self.scales.append(scaler.get_scale())


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 2},
}


WHEN_TIGHT = ("plain", "norm")
PLACES = [
    pytest.param(way, tight, marks=[] if tight == (way in WHEN_TIGHT) else [pytest.mark.slow])
    for way in WAYS
    for tight in (False, True)
]


@pytest.mark.parametrize(("way", "tight"), PLACES)
def test_bits_and_scales_are_those_of_plain_lightning(
    way: str, tight: bool, tmp_path: Path
) -> None:
    plain, paged = Overflowing(), Overflowing()
    fit(plain, tmp_path / "plain", plugins=[halves()], **WAYS[way])
    budget_gb = smallest_gb(Net, tmp_path / "tried", durability="step") * 1.05 if tight else 0.5
    strategy = mt.MegaTrainStrategy(max_ram_gb=budget_gb, durability="step", layer_major=not tight)
    fit(paged, tmp_path / "paged", strategy, plugins=[halves()], **WAYS[way])
    assert_same(paged, plain)
    assert paged.scales == plain.scales
    assert 32768.0 in plain.scales, "it fell"
    assert strategy.engine is not None
    assert strategy.engine.stats.skipped_steps == 1
    start = Net().state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in plain.state_dict().items())


def test_the_scale_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    whole, first, second = Overflowing(), Overflowing(), Overflowing()
    fit(whole, tmp_path, plugins=[halves()])
    settings = {"offload_dir": tmp_path / "pages", "max_ram_gb": 0.5, "durability": "step"}
    fit(first, tmp_path, mt.MegaTrainStrategy(**settings), plugins=[halves()], max_steps=3)
    scales = first.scales
    del first  # lets go of the directory
    again = mt.MegaTrainStrategy(on_existing="resume", **settings)
    fit(second, tmp_path, again, plugins=[halves()])
    assert_same(second, whole)
    assert scales + second.scales == whole.scales


@pytest.mark.parametrize(("at", "durability"), [(2, "step"), (3, "step"), (2, "checkpoint")])
def test_a_run_that_breaks_off_around_a_skipped_step_goes_on_as_if_it_had_not(
    at: int, durability: Any, tmp_path: Path
) -> None:
    class Breaking(Overflowing):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == at:
                raise RuntimeError("broken off")

    whole, first, second = Overflowing(), Breaking(), Overflowing()
    fit(whole, tmp_path, plugins=[halves()])
    settings = {"offload_dir": tmp_path / "pages", "max_ram_gb": 0.5, "durability": durability}
    with pytest.raises(RuntimeError, match="broken off"):
        fit(first, tmp_path, mt.MegaTrainStrategy(**settings), plugins=[halves()])
    del first
    again = mt.MegaTrainStrategy(on_existing="resume", **settings)
    trainer = fit(second, tmp_path, again, plugins=[halves()])
    assert_same(second, whole)
    assert second.scales == whole.scales[-len(second.scales) :]
    # The second batch was skipped, and changed nothing: it is taken, and skipped, once more.
    assert len(second.scales) == {2: 3, 3: 1}[at]
    assert trainer.global_step == whole.trainer.global_step


def test_a_checkpoint_holds_the_scaler_for_either(tmp_path: Path) -> None:
    states = []
    for strategy in ("auto", mt.MegaTrainStrategy(max_ram_gb=0.5)):
        trainer = fit(Overflowing(), tmp_path, strategy, plugins=[halves()], max_steps=2)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
        states.append(saved["MixedPrecision"])
    assert states[0] == states[1]
    assert states[0]["scale"] == 32768.0
    plugin = mt.MegaTrainPrecision("16-mixed")
    plugin.on_load_checkpoint(saved)
    assert plugin.state_dict() == states[0]


@pytest.mark.parametrize("factor", ["init_scale", "growth_factor"])
def test_a_scale_that_would_cost_bits_is_refused(factor: str) -> None:
    with pytest.raises(mt.ConfigError, match=f"{factor}=3.*powers of two"):
        mt.MegaTrainPrecision("16-mixed", halves(**{factor: 3.0}).scaler)


def test_raising_at_infinities_is_refused(tmp_path: Path) -> None:
    strategy = mt.MegaTrainStrategy(nonfinite="raise")
    with pytest.raises(mt.ConfigError, match="nonfinite='raise'.*'16-mixed'"):
        fit(Net(), tmp_path, strategy, plugins=[halves()])
