"""An export holds one piece of one tensor, however large the model is."""

from __future__ import annotations

from pathlib import Path

import pytest

from .measure import MIB, run_measured

WAYS = ("in fit", "parked", "run", "checkpoint")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "limit_mib"),
    [(512, 10, 16), pytest.param(1024, 12, 32, marks=pytest.mark.slow)],
)
def test_an_export_needs_no_memory_that_grows_with_the_model(
    hidden_size: int, num_layers: int, limit_mib: int, tmp_path: Path
) -> None:
    sizes = (str(hidden_size), str(num_layers))
    measured = run_measured("tests.memory.export_run", str(tmp_path), *sizes, imported=True)
    limit = limit_mib * MIB
    assert measured.result["nbytes"] > 6 * limit
    for way in WAYS:
        end = f"{way} done"
        held = measured.peak_bytes(way, end) - measured.bytes_at(way)
        assert held < limit, (way, held / MIB)
        # Mapped files are let go of as they are written, too.
        mapped = measured.file_growth_bytes(way, end)
        assert mapped < limit, (way, mapped / MIB)
