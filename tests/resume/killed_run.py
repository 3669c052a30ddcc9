"""One run, told by an order, that test_kill ends wherever it likes: run in a forked process.

The order is JSON with `directory`, `resume`, `result` (a file for what the run told), `flag` (a
file of 8 bytes, see Flag), `sabotage`, `commit_s` (seconds between commits, where not every step is
one), `paging` (settings of the strategy) and `run` (settings of `train`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mt_lightning.engine import step_commits
from mt_lightning.resume import position, run_state
from mt_lightning.tiers.commit import CommitLog
from mt_lightning.tiers.store import FileStore

from .run import Told, paged, train

TERMINATED = 143
"""The exit code of a run that SIGTERM ended."""


class Flag:
    """Eight bytes that another process can read after this one was killed.

    Byte 0: whether training has begun. Byte 1: how many page writes and commits are under way.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self._lock = threading.Lock()
        self.begun = self.ended = 0.0

    def begin(self) -> None:
        self._memory[0] = 1
        self.begun = time.monotonic()

    def end(self) -> None:
        self.ended = time.monotonic()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._lock:
            self._memory[1] += 1
        try:
            yield
        finally:
            with self._lock:
                self._memory[1] -= 1


def watch(flag: Flag) -> None:
    """Let page writes, syncs and commits raise the flag."""
    for owner, name in ((FileStore, "write"), (FileStore, "sync"), (CommitLog, "write")):
        setattr(owner, name, _watched(getattr(owner, name), flag))


def _watched(function: Any, flag: Flag) -> Any:
    def wrapped(*arguments: Any) -> Any:
        with flag.writing():
            return function(*arguments)

    return wrapped


def sabotage(kind: str) -> None:
    """Break the restoration in a way that loads without an error."""
    if kind == "rng":
        position.DataPosition._give_rng = lambda self, state: None
    elif kind == "scheduler":
        give = run_state._give

        def give_no_schedule(trainer: Any, state: dict[str, Any], buffers: Any) -> None:
            fresh = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
            give(trainer, {**state, "lr_schedulers": fresh}, buffers)

        run_state._give = give_no_schedule
    elif kind == "data":
        give = run_state.DataPosition.give
        run_state.DataPosition.give = lambda self, taken, fetcher: give(
            self, {**taken, "num_batches": taken["num_batches"] - 1}, fetcher
        )


def run(order: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    flag = Flag(order["flag"])
    watch(flag)
    if order["sabotage"]:
        sabotage(order["sabotage"])
    Told.on_train_start = lambda self: flag.begin()
    Told.on_train_end = lambda self: flag.end()
    if order["commit_s"] is not None:
        step_commits.COMMIT_INTERVAL_S = order["commit_s"]
    strategy = paged(
        Path(order["directory"]),
        on_existing="resume" if order["resume"] else "error",
        **order["paging"],
    )
    module = train(strategy, **order["run"])
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.contiguous().numpy())
    told = {
        "batches": module.batches,
        "events": module.events,
        "sha256": digest.hexdigest(),
        "seconds": flag.ended - flag.begun,
    }
    Path(order["result"]).write_text(json.dumps(told))


def main() -> None:
    try:
        run(json.loads(sys.argv[1]))
    except SIGTERMException:
        sys.exit(TERMINATED)


if __name__ == "__main__":
    main()
