"""kill -9 at any moment: the run goes on from its last commit as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mt_lightning.commands.verify import verify

from ..forked.process import Process
from .killed_run import TERMINATED


class Runs:
    """Makes runs in processes that can be killed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def run(
        self,
        directory: Path,
        *,
        resume: bool = False,
        kill: random.Random | None = None,
        in_write: bool = False,
        longest_s: float = 0.0,
        number: int = signal.SIGKILL,
        sabotage: str = "",
        commit_s: float | None = None,
        paging: dict[str, Any] | None = None,
        **run: Any,
    ) -> tuple[dict[str, Any] | None, bool]:
        """Run to the end, or kill it somewhere.

        Returns:
            What the run told, None where it was killed; whether the kill hit a write or a commit.
        """
        self._count += 1
        result = self._directory / f"{self._count}.json"
        flag = self._directory / f"{self._count}.flag"
        flag.write_bytes(bytes(8))
        order = {
            "directory": str(directory),
            "resume": resume,
            "result": str(result),
            "flag": str(flag),
            "sabotage": sabotage,
            "commit_s": commit_s,
            "paging": paging or {},
            "run": run,
        }
        log = Path(f"{result}.log")
        process = Process(
            ["-m", "tests.resume.killed_run", json.dumps(order)],
            output=log,
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if kill is not None:
            self._kill(process.pid, flag, kill.uniform(0, longest_s), in_write, number)
        code = process.wait()
        if code in (-signal.SIGKILL, TERMINATED):
            return None, flag.read_bytes()[1] > 0
        assert code == 0, log.read_text()
        return json.loads(result.read_text()), False

    @staticmethod
    def _kill(pid: int, flag: Path, delay_s: float, in_write: bool, number: int) -> None:
        with flag.open("rb") as file:

            def state() -> bytes:
                return os.pread(file.fileno(), 2, 0)

            while not state()[0] and _alive(pid):
                time.sleep(0.001)
            time.sleep(delay_s)
            deadline = time.monotonic() + (2.0 if in_write else 0.0)
            while time.monotonic() < deadline and _alive(pid):
                if not state()[1]:
                    continue
                # Stopped first: what is seen under way is then under way when the kill arrives.
                os.kill(pid, signal.SIGSTOP)
                while _status(pid) not in "TZ":
                    pass
                if state()[1]:
                    break
                os.kill(pid, signal.SIGCONT)
        if _alive(pid):
            os.kill(pid, number)


def _status(pid: int) -> str:
    """Return the letter that the kernel gives the state of a process; Z where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def _alive(pid: int) -> bool:
    return _status(pid) != "Z"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 9},
    "workers": {"workers": 2, "noisy": True},
}


def check(
    runs: Runs,
    directory: Path,
    num_kills: int,
    kinds: list[str],
    seed: int,
    least_hits: float = 0.5,
    **more: Any,
) -> None:
    chance = random.Random(seed)
    expected, lengths = {}, {}
    for kind in kinds:
        expected[kind], _ = runs.run(directory / kind, **KINDS[kind], **more)
        lengths[kind] = expected[kind]["seconds"]
    kills = hits = num_runs = 0
    while kills < num_kills:
        num_runs += 1
        kind = kinds[num_runs % len(kinds)]
        place = directory / f"{kind}-{num_runs}"
        resumed = False
        # Killed once or several times on its way.
        for _ in range(chance.randint(1, 2)):
            told, hit = runs.run(
                place,
                resume=resumed,
                kill=chance,
                in_write=kills % 4 != 0,
                longest_s=lengths[kind],
                **KINDS[kind],
                **more,
            )
            if told is not None:
                break
            kills, hits, resumed = kills + 1, hits + hit, True
            # What a kill leaves is whole; what it left over can go, and nothing else goes with it.
            (report,) = verify([place], lambda *_: _forget, prune=kills % 2 == 0)
            assert not report.damaged, report.as_dict()
        if not resumed:
            continue  # it was done before it could be killed
        told, _ = runs.run(place, resume=True, **KINDS[kind], **more)
        assert_ends_as(expected[kind], told)
    print(f"{kills} kills, {hits} during a page write or a commit")
    assert hits >= least_hits * kills


def _forget(done: int) -> None:
    """Take note of nothing."""


def assert_ends_as(expected: dict[str, Any] | None, told: dict[str, Any] | None) -> None:
    assert expected is not None
    assert told is not None
    skipped = len(expected["batches"]) - len(told["batches"])
    assert told["batches"] == expected["batches"][skipped:]
    assert told["events"] == expected["events"][len(expected["events"]) - len(told["events"]) :]
    assert told["sha256"] == expected["sha256"]


def test_a_terminated_run_commits_and_leaves(runs: Runs, tmp_path: Path) -> None:
    expected, _ = runs.run(tmp_path / "straight")
    assert expected is not None
    chance = random.Random(0)
    for attempt in range(5):
        place = tmp_path / str(attempt)
        length = 0.5 * expected["seconds"]
        told, in_write = runs.run(place, kill=chance, longest_s=length, number=signal.SIGTERM)
        if told is None:
            break
    assert told is None, "never ended by the signal"
    assert not in_write
    told, _ = runs.run(place, resume=True)
    assert_ends_as(expected, told)
    assert 0 < len(told["batches"]) < len(expected["batches"])


def test_killed_runs_go_on(runs: Runs, tmp_path: Path) -> None:
    check(runs, tmp_path, 6, ["eager", "clipped"], seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_killed_runs_go_on(runs: Runs, tmp_path: Path) -> None:
    check(runs, tmp_path, 200, list(KINDS), seed=2)


@pytest.mark.parametrize("kind", ["rng", "scheduler", "data"])
def test_a_bad_restoration_would_be_seen(runs: Runs, tmp_path: Path, kind: str) -> None:
    expected, _ = runs.run(tmp_path / "straight")
    runs.run(tmp_path / "run", stop=7)
    told, _ = runs.run(tmp_path / "run", resume=True, sabotage=kind)
    with pytest.raises(AssertionError):
        assert_ends_as(expected, told)


def test_an_overfitted_run_keeps_its_loss(runs: Runs, tmp_path: Path) -> None:
    run = {"num_samples": 2, "max_steps": 120, "rate": 1e-2}
    expected, _ = runs.run(tmp_path / "straight", **run)
    runs.run(tmp_path / "run", stop=100, **run)
    told, _ = runs.run(tmp_path / "run", resume=True, **run)
    assert told is not None
    assert told["batches"][0][-1] < 0.2 < 4.0 < expected["batches"][0][-1]
    assert_ends_as(expected, told)
