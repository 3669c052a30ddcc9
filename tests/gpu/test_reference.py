"""The reference is what it says; shown on the CPU, where it is plain training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mt_lightning as mt

from .reference import Block, Halves, Net, assert_same, fit, train_masters, train_reference


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_on_a_cpu_the_reference_is_plain_lightning(
    clip_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loader draws from the generator of the CPU, as dropout would there.
    monkeypatch.setattr(Block, "dropout", 0.0)
    expected = train_reference(torch.device("cpu"), clip_norm=clip_norm)
    for strategy in ("auto", mt.MegaTrainStrategy(layer_major=False)):
        module = Net()
        fit(module, strategy, tmp_path, accelerator="cpu", gradient_clip_val=clip_norm)
        assert_same(module, expected)


def test_on_a_cpu_masters_are_those_of_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Block, "dropout", 0.0)
    module = Halves()
    strategy = mt.MegaTrainStrategy(max_ram_gb=0.5)
    fit(module, strategy, tmp_path, accelerator="cpu", precision="bf16-true")
    assert_same(module, train_masters(torch.device("cpu")))
