"""A forked process is what `python` with the same words would be."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from .process import Process, run

SCRIPT = """
import os, sys, threading
import torch
assert __name__ == "__main__"
assert threading.active_count() == 1
print(sys.argv[1:], os.getcwd(), os.environ.get("GREETING"), sys.stdin.read() == "")
match sys.argv[1]:
    case "exit":
        sys.exit(7)
    case "raise":
        raise RuntimeError("as it should")
    case "signal":
        os.kill(os.getpid(), 15)
    case "hang":
        threading.Event().wait()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("word", "code"), [("return", 0), ("exit", 7), ("raise", 1), ("signal", -15)]
)
def test_it_ends_as_python_does(script: Path, word: str, code: int) -> None:
    done = run(
        [str(script), word],
        output=script.parent / "output",
        cwd=script.parent,
        environment={"GREETING": "hello"},
    )
    assert done.returncode == code
    if word != "signal":  # which loses what was not flushed
        assert f"['{word}'] {script.parent} hello True" in done.output
    assert ("as it should" in done.output) == (word == "raise")


def test_one_that_hangs_is_ended(script: Path) -> None:
    with pytest.raises(AssertionError, match="more than 0.5 s"):
        run([str(script), "hang"], output=script.parent / "output", timeout_s=0.5)
    process = Process([str(script), "hang"], output=script.parent / "output")
    assert process.poll() is None
    assert Path(f"/proc/{process.pid}").exists()
    process.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process.pid}").exists():
        assert time.monotonic() < deadline, "it runs on"
        time.sleep(0.005)


def test_each_has_its_own_environment(script: Path) -> None:
    done = run([str(script), "x"], output=script.parent / "output", environment={})
    assert " None " in done.output
    assert "GREETING" not in os.environ
