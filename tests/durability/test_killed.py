"""A run with commits at checkpoints that is killed goes on from its last commit, to the bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from ..resume.test_kill import KINDS, Runs, assert_ends_as, check

EVERYTHING_FITS = {"durability": "checkpoint"}
# A few steps pass between two commits, so fewer kills meet one.
OFTEN: dict[str, Any] = {"commit_s": 0.02, "paging": EVERYTHING_FITS, "least_hits": 0.2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def test_killed_runs_go_on(runs: Runs, tmp_path: Path) -> None:
    # Of two kills none may meet a commit; the share is asserted where there are fifty.
    check(runs, tmp_path, 2, ["eager", "clipped"], seed=3, **{**OFTEN, "least_hits": 0.0})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_killed_runs_go_on(runs: Runs, tmp_path: Path) -> None:
    check(runs, tmp_path, 50, list(KINDS), seed=4, **OFTEN)


def test_a_terminated_run_commits_and_leaves(runs: Runs, tmp_path: Path) -> None:
    """Minutes before a commit is due."""
    expected, _ = runs.run(tmp_path / "straight", paging=EVERYTHING_FITS)
    assert expected is not None
    chance = random.Random(1)
    for attempt in range(5):
        place = tmp_path / str(attempt)
        told, _ = runs.run(
            place,
            kill=chance,
            longest_s=0.5 * expected["seconds"],
            number=signal.SIGTERM,
            paging=EVERYTHING_FITS,
        )
        if told is None:
            break
    assert told is None, "never ended by the signal"
    told, _ = runs.run(place, resume=True, paging=EVERYTHING_FITS)
    assert_ends_as(expected, told)
    assert 0 < len(told["batches"]) < len(expected["batches"])
