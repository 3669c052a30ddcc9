"""After a power cut a directory holds exactly one committed step, and not an older one."""

from __future__ import annotations

import copy
import filecmp
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

import mt_lightning as mt
from mt_lightning.engine.kept import kept
from mt_lightning.engine.restore import restore
from mt_lightning.pages.sizes import align_up
from mt_lightning.pages.table import PageTable
from mt_lightning.resume.packer import unpack
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.commit import CommitLog, CommitRecord
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.store import FileStore

from .disk import Recorder
from .nets import Net, after, assert_same, fit, parameters_of, smallest_gb

NUM_STEPS = 6


class _HoldsWeights(Callback):
    """Keeps views of page files, so that files are replaced and not written over."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: nn.Module, *_: Any) -> None:
        self.held.append(module.state_dict())


@dataclass(frozen=True)
class Case:
    """A way to train."""

    trainer: Callable[[], dict[str, Any]] = dict
    strategy: Callable[[], dict[str, Any]] = dict
    directories: tuple[str, ...] = ("pages",)
    tight: bool = False


CASES = {
    "eager": Case(),
    "clipped": Case(trainer=lambda: {"gradient_clip_val": 0.1}, tight=True),
    "accumulated": Case(trainer=lambda: {"accumulate_grad_batches": 2, "max_steps": 3}, tight=True),
    "two drives": Case(directories=("one", "two/deep")),
    "replaced files": Case(trainer=lambda: {"callbacks": [_HoldsWeights()]}),
    "lossless": Case(strategy=lambda: {"optimizer_compression": "lossless"}),
}


@dataclass
class Run:
    """A run that was recorded, and what it committed."""

    case: Case
    recorder: Recorder
    table: PageTable
    expected: dict[str, torch.Tensor]

    def directories(self, root: Path) -> list[Path]:
        return [root / name for name in self.case.directories]


def record_run(root: Path, case: Case, *, resume: bool = False) -> Run:
    """Train below `root/drive` and record every call."""
    drive = root / "drive"
    drive.mkdir(exist_ok=True)
    settings = {"max_steps": NUM_STEPS, **case.trainer()}
    plain = {k: v for k, v in settings.items() if k != "callbacks"}
    steps = plain.pop("max_steps")
    expected = after(steps, root, **plain)
    budget = smallest_gb(Net(), root, **plain) if case.tight else None
    recorder = Recorder(drive)
    write = CommitLog.write

    def told(log: CommitLog, record: CommitRecord) -> None:
        recorder.mark(("begin", record))
        write(log, record)
        recorder.mark(("durable", record))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommitLog, "write", told)
        strategy = mt.MegaTrainStrategy(
            [drive / name for name in case.directories],
            max_ram_gb=budget,
            on_existing="resume" if resume else "error",
            **{"durability": "step", **case.strategy()},
        )
        recorder.install(patch)
        module = Net()
        fit(module, root, strategy, **settings)
        assert strategy.engine is not None
        table = copy.deepcopy(strategy.engine._build.table)  # type: ignore[union-attr]
    assert_same(parameters_of(module), expected)
    strategy._close()
    return Run(case, recorder, table, expected)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    runs: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in runs:
            runs[name] = record_run(tmp_path_factory.mktemp("run"), CASES[name])
        return runs[name]

    return get


def check(run: Run, root: Path, moment: int) -> int | None:
    """Open what was left with the code that resumes; return the step it stands at.

    Raises:
        AssertionError: it is no committed step, or an older one than was reported durable.
        MegaTrainError: a file that a commit names is damaged.
    """
    marks = [event[1] for event in run.recorder.events[:moment] if event[0] == "mark"]
    known = {record.sequence: record for _, record in marks}
    durable = max((r.sequence for what, r in marks if what == "durable"), default=0)
    before = [root / name for name in run.case.directories]
    directories = sorted(before, key=lambda path: not list(path.glob("commit.*")))
    if not directories[0].is_dir():
        assert not durable
        return None
    found = CommitLog(directories).latest()
    if found is None:
        assert not durable, f"commit {durable} was reported durable and is gone"
        return None
    assert found.sequence >= durable, f"{found.sequence} is older than {durable}"
    expected = known[found.sequence]
    assert found.step == expected.step
    assert found.slots == expected.slots
    assert found.sums.keys() == expected.sums.keys()
    for name, sums in expected.sums.items():
        np.testing.assert_array_equal(found.sums[name], sums)
    with pytest.MonkeyPatch.context() as patch:
        # What is left after the crash need not survive another one.
        patch.setattr("mt_lightning.tiers.store.sync_path", lambda path: None)
        store = FileStore(directories)
    io = IOQueue(store, num_threads=1)
    try:
        table = copy.deepcopy(run.table)
        assert store.read_small(str(found.meta["layout"])) is not None
        restore(table, found, store)
        read_all(table, io)
        if (state := found.tensors.get("run")) is not None:
            kept(store, unpack(state.numpy().tobytes())["kept_buffers"])
    finally:
        io.close()
        store.close()
    return found.step


def read_all(table: PageTable, io: IOQueue) -> None:
    """Read every plane as a run does, checksums included."""
    for page in table:
        if page.weight.slot is not None:
            frame = Frame(page.weight.nbytes)
            io.read(page.weight.file, [(0, frame.memory)], sums=page.weight.sums[0]).wait()
        if page.state.slot is None:
            continue
        for chunk in page.state_layout.chunks:
            if not any(page.small[segment.param].present for segment in chunk.segments):
                continue
            if page.state_layout.slots:
                frame = Frame(align_up(page.state.lengths[chunk.index]))
                pieces = [(page.state_layout.slots[chunk.index][0], frame.memory)]
            else:
                pieces = chunk.split(Frame(chunk.nbytes).memory)
            io.read(page.state.file, pieces, sums=page.state.sums[chunk.index]).wait()


def crash(run: Run, place: Path, seed: int) -> tuple[Path, int]:
    """Cut the power at a random moment; return what is left, and the moment."""
    chance = random.Random(seed)
    moment = chance.randint(0, len(run.recorder.events))
    place.mkdir()
    run.recorder.leave(place, moment, chance)
    return place, moment


def trials(run: Run, root: Path, seeds: range) -> list[int | None]:
    found = []
    for seed in seeds:
        place, moment = crash(run, root / str(seed), seed)
        try:
            found.append(check(run, place, moment))
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {moment} events: {error}") from error
    return found


QUICK = ["eager", "clipped", "two drives"]


@pytest.mark.parametrize(
    "name", [*QUICK, *[pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in QUICK]]
)
def test_exactly_one_committed_step_is_left(
    recorded: Callable[[str], Run], tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    num_trials = 167 if request.config.getoption("--slow") else 10
    run = recorded(name)
    steps = trials(run, tmp_path, range(num_trials))
    assert len({step for step in steps if step}) > 2  # the crashes were all over the run


@pytest.mark.parametrize("name", CASES)
def test_the_recording_is_complete(
    recorded: Callable[[str], Run], tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """With everything surviving, the files are those of the run."""
    if name not in QUICK and not request.config.getoption("--slow"):
        name = "replaced files"
    run = recorded(name)
    run.recorder.leave(tmp_path, len(run.recorder.events), None)
    files = [path for path in run.recorder.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        if path.name != "lock":
            other = tmp_path / path.relative_to(run.recorder.root)
            assert filecmp.cmp(path, other, shallow=False), path


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("eager", 3),
        ("clipped", 5),
        *[
            pytest.param(name, seed, marks=pytest.mark.slow)
            for name in CASES
            for seed in range(100, 110)
        ],
    ],
)
def test_a_run_goes_on_from_what_is_left_and_may_crash_again(
    recorded: Callable[[str], Run], tmp_path: Path, name: str, seed: int
) -> None:
    run = recorded(name)
    for attempt in range(100):
        place, moment = crash(run, tmp_path / f"{attempt}", 1000 * seed + attempt)
        if check(run, place, moment):
            break
    root = tmp_path / "again"
    root.mkdir()
    place.rename(root / "drive")
    again = record_run(root, run.case, resume=True)  # it ends with the bits of plain training
    for attempt in range(3):
        place, moment = crash(again, tmp_path / f"again-{attempt}", 1000 * seed + attempt)
        steps = check_resumed(run, again, place, moment)
        assert steps


def check_resumed(run: Run, again: Run, place: Path, moment: int) -> int | None:
    """Check what is left of a second run: a commit of the first one counts until its own does."""
    first = [event for event in run.recorder.events if event[0] == "mark"]
    events = again.recorder.events
    durable = [event for event in first if event[1][0] == "begin"]
    try:
        again.recorder.events = [*durable, *events]
        return check(again, place, moment + len(durable))
    finally:
        again.recorder.events = events


class _WithoutSync:
    """The module `os`, of which one function does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fdatasync(self, fd: int) -> None:
        pass


SABOTAGE = {
    "data sync": ("mt_lightning.tiers.pagefile.PageFiles.sync", lambda self, file: None),
    "record sync": ("mt_lightning.tiers.commit.os", _WithoutSync()),
    "name sync": ("mt_lightning.tiers.store.sync_directory", lambda path: None),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_a_missing_sync_would_be_seen(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, nothing = SABOTAGE[what]
    with monkeypatch.context() as patch:
        patch.setattr(target, nothing)
        run = record_run(tmp_path, CASES["eager"])
    with pytest.raises(AssertionError, match="seed"):
        trials(run, tmp_path, range(30))
