"""Processes of the server, as `subprocess` has them."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


@functools.cache
def _address() -> tuple[str, int]:
    """Return the name of the server of this test run, and the process with which it ends."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return f"mt-{uuid.uuid4().hex}", os.getpid()
    return f"mt-{run}", os.getppid()


def _connect() -> socket.socket:
    name, owner = _address()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
    except ConnectionRefusedError:
        command = [sys.executable, "-W", "ignore", "-m", "tests.forked.server", name, str(owner)]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)
        connection.connect(f"\0{name}")
    return connection


class Process:
    """A process that does what `python *words` would, with everything imported.

    Args:
        words: A script and its arguments, or `-m`, a module and its arguments.
        output: The file to which standard output and errors are appended.
        cwd: The working directory.
        environment: All variables of the process. What is read while libraries are loaded, as
            `OMP_NUM_THREADS`, is that of the server.

    Attributes:
        pid: The process id; the process is no child of this one.
        returncode: The exit code as `subprocess` has it, None while it runs.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        output: Path,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.args = list(words)
        self.returncode: int | None = None
        order = {
            "words": self.args,
            "output": str(output),
            "cwd": str(cwd),
            "environment": dict(os.environ if environment is None else environment),
        }
        self._connection = _connect()
        self._connection.sendall(json.dumps(order).encode() + b"\n")
        self._received = b""
        self.pid = self._number(START_TIMEOUT_S)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        try:
            return self.wait(0.0)
        except BlockingIOError:
            return None

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code once the process has ended.

        Raises:
            TimeoutError: It runs for longer.
            BlockingIOError: It runs, and `timeout_s` is 0.
        """
        if self.returncode is None:
            self.returncode = self._number(timeout_s)
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        """End the process: the server does it when nobody listens any more."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
            self._connection.close()

    def _number(self, timeout_s: float | None) -> int:
        """Return the number that the server sends next."""
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._received:
            received = self._connection.recv(64)
            assert received, "the server of processes has ended"
            self._received += received
        line, self._received = self._received.split(b"\n", 1)
        return int(line)


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a process ended, and what it wrote."""

    returncode: int
    output: str


def run(
    words: Sequence[str],
    *,
    output: Path,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 200.0,
) -> Done:
    """Run a process to its end.

    Raises:
        AssertionError: It takes longer than `timeout_s`.
    """
    process = Process(words, output=output, cwd=cwd, environment=environment)
    try:
        code = process.wait(timeout_s)
    except TimeoutError:
        process.kill()
        raise AssertionError(f"{shlex.join(words)} ran for more than {timeout_s} s") from None
    return Done(returncode=code, output=output.read_text())
