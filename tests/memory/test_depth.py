"""Peak memory follows the largest unit, not the depth of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from .measure import GIB, MIB, Measurement, run_measured

MAX_RAM_GB = 0.2
# 7.1 million parameters, hence 27 MiB, in each layer
LAYER = ("--hidden", "768", "--intermediate", "2048")
NUM_TOKENS = 32


@pytest.mark.parametrize(
    "depths",
    [
        pytest.param((4, 12), id="4-12"),
        pytest.param(
            (4, 16, 64), id="4-16-64", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]
        ),
    ],
)
def test_peak_memory_is_flat_in_depth(depths: tuple[int, ...], tmp_path: Path) -> None:
    # As many units run in each: peaks of freed heap that is kept vary, and the highest one counts.
    measured = {
        depth: _train(depth, 2 * max(depths) // depth, tmp_path / str(depth)) for depth in depths
    }
    shallow = measured[depths[0]].result
    assert shallow["weight_bytes"] / depths[0] > 25e6
    assert shallow["state_bytes"] > MAX_RAM_GB * GIB, "everything fits: proves nothing"
    peaks = {depth: each.peak_bytes() for depth, each in measured.items()}
    for depth, each in measured.items():
        assert each.result["ram_peak_bytes"] <= MAX_RAM_GB * GIB
        assert each.result["reloads"] > 0
        assert peaks[depth] <= 1.05 * peaks[depths[0]], {k: v / MIB for k, v in peaks.items()}


def _train(num_layers: int, num_steps: int, directory: Path) -> Measurement:
    return run_measured(
        "tests.memory.llama_run",
        *LAYER,
        *("--layers", str(num_layers), "--tokens", str(NUM_TOKENS), "--steps", str(num_steps)),
        *("--max-ram-gb", str(MAX_RAM_GB), "--directory", str(directory)),
        imported=True,
    )
