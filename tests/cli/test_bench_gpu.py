"""`megatrain bench gpu` refuses where there is nothing to measure, and shows what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mt_lightning.cli import main
from mt_lightning.commands.bench import gpu


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) != 0
    assert "torch finds none here" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--size", "9B"]) != 0
    assert "one or more of tiny, 1B, 7B, 14B, 30B" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("size", "billions"), [("1B", 1.0), ("7B", 7.0), ("14B", 14.0)])
def test_sizes_are_what_their_names_say(size: str, billions: float) -> None:
    assert gpu.num_params(size) / 1e9 == pytest.approx(billions, rel=0.12)


def test_the_table_shows_figures_and_reasons() -> None:
    speeds = [
        gpu.Speed(
            name="paged", size="7B", params=7 * 10**9, batch=4, step_s=2.0, tokens_per_s=2048.0,
            tflops=86.0, device_peak_gib=20.0, uploaded_gib=26.1,
        ),
        gpu.Speed(name="plain", size="7B", params=7 * 10**9, batch=4, error="out of device memory"),
    ]  # fmt: skip
    console = Console(width=120, record=True)
    console.print(gpu.speed_table(speeds, "on a device"))
    text = console.export_text()
    for part in ("2048", "86.0", "26.1 GiB", "out of device memory"):
        assert part in text
    assert json.loads(json.dumps(gpu.as_dicts(speeds)))[0]["tflops"] == 86.0


@pytest.mark.gpu
def test_a_tiny_model_is_measured_on_pages_and_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "gpu", "--size", "tiny", "--batch", "1", "--length", "32", "--steps", "1"]
    assert main([*command, "--dir", str(tmp_path), "--json"]) == 0
    paged, plain = json.loads(capsys.readouterr().out)
    assert (paged["name"], plain["name"]) == ("paged", "plain")
    assert paged["tokens_per_s"] > 0
    assert paged["uploaded_gib"] == 0, "it fits the device, where it stays"
    assert list(tmp_path.iterdir()) == []
