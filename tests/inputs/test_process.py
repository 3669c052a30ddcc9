"""The memory of a process does not follow the inputs of its units."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..memory.measure import GIB, MIB, Measurement, run_measured
from .long_run import INPUT_BYTES

MAX_RAM_GB = 48 / 1024


def _train(directory: Path, num_layers: int, num_batches: int) -> Measurement:
    measured = run_measured(
        "tests.inputs.long_run",
        *("--layers", str(num_layers), "--batches", str(num_batches)),
        *("--max-ram-gb", str(MAX_RAM_GB), "--directory", str(directory)),
        imported=True,
    )
    assert measured.result["ram_peak_bytes"] <= MAX_RAM_GB * GIB
    assert measured.result["inputs_bytes"] >= 2 * num_batches * (num_layers - 1) * INPUT_BYTES
    return measured


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(64, 1), (64, 6)], id="batches"),
        pytest.param(
            [(64, 1), (16, 4), (64, 4), (192, 1), (64, 16)],
            id="batches-and-depth",
            marks=[pytest.mark.slow, pytest.mark.timeout(1200)],
        ),
    ],
)
def test_peak_memory_is_flat(cases: list[tuple[int, int]], tmp_path: Path) -> None:
    peaks = {}
    for num_layers, num_batches in cases:
        measured = _train(tmp_path / f"{num_layers}-{num_batches}", num_layers, num_batches)
        peaks[num_layers, num_batches] = measured.peak_bytes("training", "trained")
        assert measured.result["inputs_spilled_bytes"] > 0, "everything fits: proves nothing"
    lowest = min(peaks.values())
    assert max(peaks.values()) <= 1.08 * lowest, {k: v / MIB for k, v in peaks.items()}
