"""Make glibc give freed tensors back at once."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_THRESHOLD_BYTES = 64 << 10
_NUM_ARENAS = 2


def return_freed_memory() -> None:
    """Serve blocks of 64 KiB and more by mappings of their own, for the whole process.

    By default glibc raises this threshold to 32 MiB after the first large block is freed. Freed
    gradients and activations then stay in the heap, beside the budget, and split it up. Each thread
    would also get a heap of its own; two are enough for all.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        log.debug("this C library has no mallopt; freed memory may stay in the heap.")
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
    libc.mallopt(_M_ARENA_MAX, _NUM_ARENAS)
