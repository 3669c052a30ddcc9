"""A model of 1.26 billion parameters, 20 GB of state, trained in less than 3 GiB of memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .measure import GIB, Measurement, run_measured

MODEL = ("--hidden", "2048", "--intermediate", "5632", "--layers", "22", "--vocab", "32000")
NUM_STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_model_bigger_than_memory(tmp_path: Path) -> None:
    first = _train(1.0, tmp_path / "first")
    assert first.result["num_parameters"] >= 1_200_000_000
    assert first.result["weight_bytes"] + first.result["state_bytes"] > 14e9
    assert first.result["unchanged"] == []
    assert first.result["all_finite"]

    second = _train(1.4, tmp_path / "second")
    for name in ("hashes", "losses"):
        assert first.result[name] == second.result[name]

    for each in (first, second):
        assert each.peak_bytes() < 3 * GIB
        # With clean files in memory too: everything that a limit of the process would count.
        assert each.peak_total_bytes("step1", "trained") < 3 * GIB
        assert each.peak_bytes("step3", "trained") <= 1.02 * each.peak_bytes("step2", "step3")


def _train(max_ram_gb: float, directory: Path) -> Measurement:
    try:
        return run_measured(
            "tests.memory.llama_run",
            *MODEL,
            *("--tokens", "32", "--steps", str(NUM_STEPS), "--hashes"),
            *("--max-ram-gb", str(max_ram_gb), "--directory", str(directory)),
            timeout_s=1700,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # 30 GB
