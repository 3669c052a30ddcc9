"""What the C library does with freed tensors: it keeps them for the next ones until told not to.

[Note: freed memory is kept, and counted]
A block that has a mapping of its own comes back from the kernel page by page, each zeroed at its
first touch. For the activations and gradients of a step that is gigabytes and costs as much as a
third of the step. So blocks come from the heap, as they do without this package, and stay there
when they are freed. What the kit counts and then frees, such as gradients, would lie there beside
the budget; `mt_lightning.pager.kept_heap` counts it and calls `give_back_heap` before something
else takes its room.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Iterator

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_KEPT_BYTES = (4 << 20) + (64 << 10)
"""A tensor of 4 MiB and what lies around it; powers of two are the usual sizes of gradients.

Blocks of 32 MiB, the most that glibc would keep, split the heap up between units."""
_LARGEST_TOP_BYTES = 64 << 20
_SMALLEST_BYTES = 64 << 10
_NUM_ARENAS = 2


def keep_freed_memory() -> None:
    """Serve blocks up to 4 MiB from the heap and keep them there, for the whole process.

    Each thread would also get a heap of its own; two are enough for all.
    """
    _set(_LARGEST_KEPT_BYTES, _LARGEST_TOP_BYTES)


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Give freed tensors back at once, for a while in which each is made once and large."""
    _set(_SMALLEST_BYTES, _SMALLEST_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()
        give_back_heap()


def _set(largest_kept_bytes: int, largest_top_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        log.debug("this C library has no mallopt; freed memory stays where it puts it.")
        return
    libc.mallopt(_M_MMAP_THRESHOLD, largest_kept_bytes)
    libc.mallopt(_M_TRIM_THRESHOLD, largest_top_bytes)
    libc.mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def give_back_heap() -> None:
    """Give every free page of the heap back to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


class OwnMemory:
    """Tells how much memory of this process no file backs."""

    def __init__(self) -> None:
        # With the lock of the interpreter held: who lets it go may wait for it for milliseconds.
        libc = ctypes.PyDLL(None)
        self._open, self._read, self._close = libc.open, libc.read, libc.close
        self._read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
        self._text = ctypes.create_string_buffer(256)

    def anonymous_bytes(self) -> int:
        """Return the bytes; 0 where the system does not tell."""
        file = self._open(b"/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        if file < 0:
            return 0
        length = self._read(file, self._text, 255)
        self._close(file)
        fields = self._text.raw[: max(0, length)].split()
        return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE if fields else 0
