"""The server: imports once, then forks a process for every order; started by `process`.

    python -m tests.forked.server NAME OWNER

It listens at the abstract address NAME and ends when process OWNER does. An order is a line of JSON
with `words` (what would follow `python`), `cwd`, `environment` and `output` (a file). The answers
are lines with the process id and, once the process has ended, with its exit code. Who hangs up
before kills the process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


class Server:
    """Forks processes, and tells who ordered them how they ended."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(os.pidfd_open(owner), selectors.EVENT_READ, self._end)
        self._running: dict[int, int] = {}
        self._order: dict[str, Any] | None = None
        self._ended = False

    def serve(self) -> dict[str, Any] | None:
        """Serve until the owner ends; in a forked process, return its order instead."""
        while not self._ended and self._order is None:
            for key, _ in self._selector.select():
                key.data(key.fileobj)
                if self._order is not None:
                    break
        if self._order is None:
            for pid in self._running.values():
                os.kill(pid, signal.SIGKILL)
        return self._order

    def _end(self, _: Any) -> None:
        self._ended = True

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.getuid():
            connection.close()
            return
        with connection.makefile("rb") as stream:
            order = json.loads(stream.readline())
        pid = os.fork()
        if not pid:
            self._order = order
            return
        _tell(connection, pid)
        descriptor = os.pidfd_open(pid)
        self._running[descriptor] = pid

        def forget() -> int:
            self._selector.unregister(descriptor)
            self._selector.unregister(connection)
            os.close(descriptor)
            _, status = os.waitpid(self._running.pop(descriptor), 0)
            return os.waitstatus_to_exitcode(status)

        def answer(_: Any) -> None:
            _tell(connection, forget())
            connection.close()

        def kill(_: Any) -> None:
            os.kill(pid, signal.SIGKILL)
            forget()
            connection.close()

        self._selector.register(descriptor, selectors.EVENT_READ, answer)
        self._selector.register(connection, selectors.EVENT_READ, kill)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever hung up will be noticed
        connection.sendall(f"{number}\n".encode())


def import_everything() -> None:
    """Import what takes long, and nothing that starts a thread."""
    import lightning.pytorch  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import mt_lightning.cli  # noqa: F401

    # A collection would write to every object, and so copy every page.
    gc.collect()
    gc.freeze()


def become(order: dict[str, Any]) -> None:
    """Do in this process what `python *words` would."""
    with open(order["output"], "ab") as output, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    match order["words"]:
        case ["-m", module, *arguments]:
            sys.path[0] = order["cwd"]
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *arguments]:
            sys.path[0] = str(Path(script).parent)
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")


def exit_code(order: dict[str, Any]) -> int:
    """Do what is ordered and what Python does at its end, but for freeing every object."""
    code = 0
    try:
        become(order)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    name, owner = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return  # another server was quicker
    listener.listen(64)
    if os.fork():
        return  # who started it knows now that it listens
    import_everything()
    order = Server(listener, int(owner)).serve()
    if order is not None:
        listener.close()
        os._exit(exit_code(order))


if __name__ == "__main__":
    main()
