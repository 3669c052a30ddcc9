"""A drive that loses its power: what a program did to files, and what may be left of it.

The calls of the system are recorded as the real code makes them. A write, a length or a name that
was not followed by its sync survives or not, each sector and each name on its own, in any order.
"""

from __future__ import annotations

import os
import pathlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PAGE_SECTOR = 4096
SECTOR = 512
FOLDER = "folder"


@dataclass
class Inode:
    """A file or folder as the drive holds it for sure, and what is not sure yet."""

    kind: str = "file"
    data: bytearray = field(default_factory=bytearray)
    entries: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)

    def apply(self, change: tuple[Any, ...]) -> None:
        what, *rest = change
        if what == "write":
            offset, data = rest
            self.data.extend(bytes(max(0, offset + len(data) - len(self.data))))
            self.data[offset : offset + len(data)] = data
        elif what == "length":
            (length,) = rest
            self.data.extend(bytes(max(0, length - len(self.data))))
            del self.data[length:]
        elif what == "name":
            name, number = rest
            self.entries[name] = number
        elif what == "no name":
            (name,) = rest
            self.entries.pop(name, None)
        elif what == "rename":
            old, new, number = rest
            self.entries.pop(old, None)
            self.entries[new] = number


class Recorder:
    """Records what this process does to the files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[tuple[Any, ...]] = []
        """("change", inode, change), ("sync", inode, events before it), ("mark", anything)."""
        self._lock = threading.RLock()
        self._numbers: dict[str, int] = {}
        self._fds: dict[int, int] = {}
        self._kinds: list[str] = []
        self._start: list[Inode] = []
        self._take_in(root)

    # -- what is there ------------------------------------------------------------------------

    def _new(self, kind: str) -> int:
        self._kinds.append(kind)
        return len(self._kinds) - 1

    def _take_in(self, path: Path) -> int:
        number = self._numbers[str(path)] = self._new(FOLDER if path.is_dir() else "file")
        inode = Inode(self._kinds[number])
        self._start.append(inode)
        if path.is_dir():
            for entry in sorted(path.iterdir()):
                inode.entries[entry.name] = self._take_in(entry)
        else:
            inode.data[:] = path.read_bytes()
        return number

    def mark(self, what: Any) -> None:
        with self._lock:
            self.events.append(("mark", what))

    # -- the calls ----------------------------------------------------------------------------

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (
            "open", "close", "pwrite", "pwritev", "posix_fallocate", "ftruncate", "fsync",
            "fdatasync", "replace", "unlink", "mkdir", "rmdir",
        ):  # fmt: skip
            handler: Callable[..., Any] = getattr(self, f"_{name}")
            wrapped = self._wrap(getattr(os, name), handler)
            monkeypatch.setattr(os, name, wrapped)
            # Up to Python 3.10 `Path` took them from there, and kept them.
            accessor = getattr(pathlib, "_NormalAccessor", None)
            if accessor is not None and name in ("replace", "unlink", "mkdir", "rmdir"):
                monkeypatch.setattr(accessor, name, staticmethod(wrapped))

    @staticmethod
    def _wrap(call: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            return handler(call, *arguments, **named)

        return wrapped

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the full path if it lies below the root."""
        if isinstance(path, int):
            return None
        text = os.fspath(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        full = os.path.abspath(text)
        return full if full == str(self.root) or full.startswith(f"{self.root}/") else None

    def _change(self, number: int, *change: Any) -> None:
        with self._lock:
            self.events.append(("change", number, change))

    def _parent(self, full: str) -> int:
        return self._numbers[os.path.dirname(full)]

    def _open(self, call: Any, path: Any, flags: int, *mode: Any, **named: Any) -> int:
        full = self._path(path, named.get("dir_fd"))
        if full is None:
            return call(path, flags, *mode, **named)
        with self._lock:
            known = full in self._numbers
            fd = call(path, flags, *mode, **named)
            if not known and flags & os.O_CREAT:
                self._numbers[full] = self._new("file")
                name = os.path.basename(full)
                self._change(self._parent(full), "name", name, self._numbers[full])
            elif flags & os.O_TRUNC:
                self._change(self._numbers[full], "length", 0)
            if full in self._numbers:
                self._fds[fd] = self._numbers[full]
            return fd

    def _close(self, call: Any, fd: int) -> None:
        with self._lock:
            self._fds.pop(fd, None)
            call(fd)

    def _write(self, fd: int, offset: int, data: bytes) -> None:
        if fd in self._fds:
            self._change(self._fds[fd], "write", offset, data)

    def _pwrite(self, call: Any, fd: int, data: Any, offset: int) -> int:
        kept = bytes(data)
        moved = call(fd, data, offset)
        self._write(fd, offset, kept[:moved])
        return moved

    def _pwritev(self, call: Any, fd: int, buffers: list[Any], offset: int) -> int:
        kept = b"".join(bytes(buffer) for buffer in buffers)
        moved = call(fd, buffers, offset)
        self._write(fd, offset, kept[:moved])
        return moved

    def _posix_fallocate(self, call: Any, fd: int, offset: int, length: int) -> None:
        call(fd, offset, length)
        if fd in self._fds:
            self._change(self._fds[fd], "length", os.fstat(fd).st_size)

    def _ftruncate(self, call: Any, fd: int, length: int) -> None:
        call(fd, length)
        if fd in self._fds:
            self._change(self._fds[fd], "length", length)

    def _fsync(self, call: Any, fd: int) -> None:
        before = len(self.events)
        call(fd)
        if fd in self._fds:
            with self._lock:
                self.events.append(("sync", self._fds[fd], before))

    _fdatasync = _fsync

    def _replace(self, call: Any, source: Any, target: Any) -> None:
        old, new = self._path(source), self._path(target)
        with self._lock:
            call(source, target)
            if old is None and new is None:
                return
            assert old is not None
            assert new is not None
            assert os.path.dirname(old) == os.path.dirname(new)
            number = self._numbers[new] = self._numbers.pop(old)
            names = os.path.basename(old), os.path.basename(new)
            self._change(self._parent(new), "rename", *names, number)

    def _unlink(self, call: Any, path: Any, **named: Any) -> None:
        full = self._path(path, named.get("dir_fd"))
        with self._lock:
            call(path, **named)
            if full is not None and self._numbers.pop(full, None) is not None:
                self._change(self._parent(full), "no name", os.path.basename(full))

    _rmdir = _unlink

    def _mkdir(self, call: Any, path: Any, *mode: Any, **named: Any) -> None:
        full = self._path(path, named.get("dir_fd"))
        with self._lock:
            call(path, *mode, **named)
            if full is not None:
                self._numbers[full] = self._new(FOLDER)
                name = os.path.basename(full)
                self._change(self._parent(full), "name", name, self._numbers[full])

    # -- the crash ----------------------------------------------------------------------------

    def leave(self, target: Path, moment: int, chance: random.Random | None) -> None:
        """Write what a power cut after `moment` events may leave.

        Args:
            target: An empty folder, which takes the place of the root.
            moment: How many events had ended.
            chance: Draws what survives; None: everything.
        """
        inodes = [*map(_copy, self._start)]
        inodes += [Inode(kind) for kind in self._kinds[len(inodes) :]]
        for index, event in enumerate(self.events[:moment]):
            what, number, *rest = event if event[0] != "mark" else ("mark", 0)
            if what == "change":
                inodes[number].pending.append((index, rest[0]))
            elif what == "sync":
                inode = inodes[number]
                for _, change in [p for p in inode.pending if p[0] < rest[0]]:
                    inode.apply(change)
                inode.pending = [p for p in inode.pending if p[0] >= rest[0]]
        _lay_down(inodes, 0, target, chance)


def _copy(inode: Inode) -> Inode:
    return Inode(inode.kind, bytearray(inode.data), dict(inode.entries))


def _lay_down(inodes: list[Inode], number: int, path: Path, chance: random.Random | None) -> None:
    inode = inodes[number]
    changes = [change for _, change in inode.pending]
    # Whole files survive or are lost more often than chance has it: a cache is written in runs.
    share = 1.0 if chance is None else chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))

    def survives() -> bool:
        return chance is None or chance.random() < share

    if inode.kind == FOLDER:
        for change in changes:
            if survives():
                inode.apply(change)
        path.mkdir(exist_ok=True)
        for name, child in inode.entries.items():
            _lay_down(inodes, child, path / name, chance)
        return
    sector = PAGE_SECTOR if path.parent.name == "pages" else SECTOR
    length = len(inode.data)
    for what, *rest in changes:
        if what == "write":
            offset, data = rest
            for start in range(0, len(data), sector):
                if survives():
                    inode.apply(("write", offset + start, data[start : start + sector]))
            reached = max(length, offset + len(data))
        else:
            reached = rest[0]
        if survives():
            length = reached
    if chance is not None and len(changes) > 1 and chance.random() < 0.3:
        _put_back(inode, changes, sector, chance)
    inode.apply(("length", length))
    with open(path, "wb") as file:
        file.truncate(length)
        for start in range(0, length, 1 << 16):
            part = inode.data[start : start + (1 << 16)]
            if any(part):
                file.seek(start)
                file.write(part)


def _put_back(
    inode: Inode, changes: list[tuple[Any, ...]], sector: int, chance: random.Random
) -> None:
    """Let sectors of earlier writes come after later ones."""
    writes = [rest for what, *rest in changes if what == "write"]
    for offset, data in chance.sample(writes, len(writes) // 2):
        for start in range(0, len(data), sector):
            if chance.random() < 0.3:
                inode.apply(("write", offset + start, data[start : start + sector]))
