"""A real model: SmolLM2-135M, fine-tuned in full fp32 within half a GiB of paged memory.

1x256 tokens, gradient norm clipped to 1.0, against plain Lightning with gradient checkpointing, in
fresh processes that load the same safetensors copy.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from mt_lightning.huggingface.loading import smollm2_directory

from ..memory.measure import GIB, MIB, Measurement, run_measured

MAX_RAM_GB = 0.5


@functools.cache
def weights() -> Path:
    """Return the safetensors copy, made on first use."""
    return smollm2_directory()


@pytest.mark.parametrize(
    "num_steps",
    [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_equals_plain_lightning_in_a_fraction_of_its_memory(num_steps: int, tmp_path: Path) -> None:
    plain = _run("plain", num_steps, tmp_path)
    paged = _run("paged", num_steps, tmp_path)
    activations = _run("activations", 1, tmp_path)

    assert plain.result["num_parameters"] > 130e6
    assert len(plain.result["losses"]) == num_steps
    assert paged.result["losses"] == plain.result["losses"]
    assert paged.result["sha256"] == plain.result["sha256"]
    assert paged.result["paging"]["evictions"] > 0
    assert paged.result["paging"]["reloads"] > 0

    # The peaks of loading and of training alike: the whole life of each process.
    peak, base = paged.peak_bytes(), paged.bytes_at("imported")
    live = activations.peak_bytes("step1", "trained") - activations.bytes_at("step1")
    sizes = (
        f"paged {peak / MIB:.0f} MiB (base {base / MIB:.0f}, activations {live / MIB:.0f}), "
        f"plain {plain.peak_bytes() / MIB:.0f} MiB"
    )
    assert paged.result["paging"]["ram_peak_bytes"] <= MAX_RAM_GB * GIB
    assert peak <= 0.40 * plain.peak_bytes(), sizes
    assert peak <= 1.10 * (base + MAX_RAM_GB * GIB + live), sizes
    assert paged.file_growth_bytes("step1", "trained") <= 100e6


def _run(mode: str, num_steps: int, directory: Path) -> Measurement:
    return run_measured(
        "tests.parity.smollm2_run",
        mode,
        *("--model", str(weights()), "--steps", str(num_steps)),
        *("--max-ram-gb", str(MAX_RAM_GB), "--directory", str(directory / mode)),
        imported=True,
    )
