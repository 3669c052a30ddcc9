"""The counters are what the kernel says that the drive moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mt_lightning.tiers.filesystem import is_memory

from ..forked.process import run
from .cases import gpt_case
from .simulator import Simulator

SIZES = {"width": 512, "num_layers": 3, "vocab": 1024}
NUM_STEPS = 3


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count I/O")
@pytest.mark.parametrize("deferred", [False, True])
def test_the_kernel_counts_the_same(deferred: bool, tmp_path: Path) -> None:
    if is_memory(tmp_path):
        pytest.skip("files in memory move no bytes")
    mode = {"depth": 2, "deferred": deferred, "micro_batches": 1, **SIZES}
    case = gpt_case(budget="tight", **mode)
    pages_bytes = sum(unit.weight_bytes + unit.state_bytes for unit in case.units)
    assert pages_bytes >= 100e6
    settings = {"budget_bytes": case.budget_bytes, "num_steps": NUM_STEPS, **mode}
    done = run(
        ["-m", "tests.bytes.process_run", str(tmp_path), json.dumps(settings)],
        output=tmp_path / "output.txt",
    )
    assert done.returncode == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    predicted = list(Simulator(case).run(NUM_STEPS))
    for which, name in enumerate(("read", "written")):
        moved = {
            source: found[source][-1][which] - found[source][0][which]
            for source in ("kernel", "counters")
        }
        assert moved["counters"] == predicted[NUM_STEPS - 1][which] - predicted[0][which]
        assert moved["counters"] > pages_bytes, name
        assert abs(moved["kernel"] / moved["counters"] - 1) < 0.01, (name, moved)
