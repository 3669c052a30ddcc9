from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from mt_lightning.errors import ConfigError
from mt_lightning.tiers.lock import DirectoryLock, held_directories
from tests.forked.process import Process

HOLD = """
import sys
import time
from mt_lightning.tiers.lock import DirectoryLock
lock = DirectoryLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_other_process_is_named(tmp_path: Path) -> None:
    script, output, held = tmp_path / "hold.py", tmp_path / "output", tmp_path / "held"
    script.write_text(HOLD)
    child = Process([str(script), str(held)], output=output)
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_text() != "held\n":
        assert child.poll() is None, output.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    lock = DirectoryLock(held)
    with pytest.raises(ConfigError, match=f"pid {child.pid} on host .*offload_dir"):
        lock.acquire()
    child.kill()
    while Path(f"/proc/{child.pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    lock.acquire()
    assert (held / "lock").read_text().split()[0] == str(os.getpid())
    lock.release()


def test_same_process_is_refused_too(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    first, second = DirectoryLock(directory), DirectoryLock(tmp_path / "made" / "." / "here")
    first.acquire()
    with pytest.raises(ConfigError, match="this process"):
        second.acquire()
    second.release()
    with pytest.raises(ConfigError, match="this process"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    second.release()


def test_a_run_may_be_collected_while_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the garbage collector ends gives its lock back, in whatever thread and line that is.
    forgotten, begun = DirectoryLock(tmp_path / "forgotten"), DirectoryLock(tmp_path / "begun")
    forgotten.acquire()
    name = socket.gethostname()

    def collect() -> str:
        forgotten.release()
        return name

    monkeypatch.setattr(socket, "gethostname", collect)
    begun.acquire()
    held = held_directories()
    assert tmp_path / "begun" in held
    assert tmp_path / "forgotten" not in held
    begun.release()
