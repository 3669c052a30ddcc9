"""An update goes on behind the writes of the one before; commits, and who retires it, wait."""

from __future__ import annotations

import threading

import pytest

from mt_lightning.engine.ending import Ending
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.errors import StorageError
from mt_lightning.tiers.ledger import WRITE, Ledger, keep
from mt_lightning.tiers.watch import Watch

WAIT_S = 10.0


class Write:
    """A write that ends when it is let, or fails then."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.let = threading.Event()
        self.error = error

    def wait(self) -> None:
        assert self.let.wait(WAIT_S)
        if self.error is not None:
            raise self.error


class Run:
    """A worker, and what happened on it in which order."""

    def __init__(self) -> None:
        self.worker = UpdateWorker(Watch(), Ledger())
        self.happened: list[str] = []
        self.stepped = {page: threading.Event() for page in range(3)}

    def update(self, page: int, write: Write) -> None:
        def run() -> Ending:
            self.happened.append(f"step {page}")
            self.stepped[page].set()
            return Ending([write], lambda: self.happened.append(f"written {page}"))

        self.worker.submit(run, page, lambda: self.happened.append(f"retire {page}"))

    def commit(self) -> None:
        self.worker.submit(lambda: self.happened.append("commit"), None, lambda: None)


def test_the_next_page_is_stepped_while_the_last_bytes_of_one_are_written() -> None:
    run, writes = Run(), [Write(), Write()]
    run.update(0, writes[0])
    run.update(1, writes[1])
    run.commit()
    assert run.stepped[1].wait(WAIT_S)
    assert run.happened == ["step 0", "step 1"]
    for write in writes:
        write.let.set()
    run.worker.drain()
    run.worker.close()
    assert [what for what in run.happened if "retire" not in what] == [
        "step 0", "step 1", "written 0", "written 1", "commit",
    ]  # fmt: skip
    for page in (0, 1):
        retired = run.happened.index(f"retire {page}")
        assert run.happened.index(f"written {page}") < retired


def test_nothing_is_committed_after_a_write_has_failed() -> None:
    run, lost, whole = Run(), Write(StorageError(None, "lost")), Write()
    run.update(0, lost)
    run.update(1, whole)
    run.commit()
    assert run.stepped[1].wait(WAIT_S)
    lost.let.set()
    whole.let.set()
    errors = run.worker.abandon()
    assert lost.error in errors
    assert "commit" not in run.happened
    assert "written 0" not in run.happened
    assert {"retire 0", "retire 1"} <= set(run.happened)
    run.commit()  # it can be used again
    run.worker.drain()
    run.worker.close()
    assert run.happened[-1] == "commit"


def test_an_interrupted_wait_leaves_the_job_pending_and_applies_it_once() -> None:
    run, write = Run(), Write(KeyboardInterrupt())
    run.update(0, write)
    write.let.set()
    with pytest.raises(KeyboardInterrupt):
        run.worker.drain()
    assert run.happened == ["step 0"]
    assert run.worker.is_pending(0)
    write.error = None
    run.worker.drain()
    run.worker.close()
    assert run.happened == ["step 0", "written 0", "retire 0"]


def test_a_wait_for_writes_of_an_update_counts_as_one_for_the_drive() -> None:
    run, write, ledger = Run(), Write(), Ledger()
    run.update(0, write)
    assert run.stepped[0].wait(WAIT_S)
    keep(ledger)
    try:
        threading.Timer(0.05, write.let.set).start()
        run.worker.drain()
    finally:
        keep(None)
    run.worker.close()
    assert 0.02 < ledger.behind[WRITE] < WAIT_S
