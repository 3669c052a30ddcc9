"""The measurement of memory sees what a process, its shared memory and its children use."""

from __future__ import annotations

import pytest

from .measure import MIB, run_measured

NUM_BYTES = 96 * MIB


def test_every_kind_of_memory_is_seen() -> None:
    measured = run_measured("tests.memory.burn", str(NUM_BYTES))
    base = measured.bytes_at("own")
    assert base < 64 * MIB
    for start, end in (("own", "freed"), ("shared", "child"), ("child", "end")):
        assert measured.peak_bytes(start, end) - base > 0.95 * NUM_BYTES, start
    assert measured.peak_bytes("end") - base < 0.5 * NUM_BYTES
    assert measured.file_growth_bytes("own", "freed") < 8 * MIB
    assert measured.peak_total_bytes() > measured.peak_bytes()
    assert measured.result == {"mib": 96}
    assert measured.summary()["phases"]["own"]["peak_anon_mib"] > 90


def test_a_failure_shows_what_the_script_wrote() -> None:
    with pytest.raises(AssertionError, match="invalid literal for int"):
        run_measured("tests.memory.burn", "many")


def test_a_script_that_hangs_is_ended() -> None:
    with pytest.raises(AssertionError, match="more than 0.05 s"):
        run_measured("tests.memory.burn", str(NUM_BYTES), timeout_s=0.05)
