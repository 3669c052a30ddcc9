"""Keep a thread from having a team of OpenMP threads of its own.

[Note: one team]
The threads of a team spin at a barrier for a moment before they sleep, unless all teams of a
process have more threads together than there are processors. Every thread that runs torch's
parallel loops has a team of its own, for good. Were the update worker to have one, that of the
training thread would sleep and be woken thousands of times a step. So an update runs on the
worker's own thread where that changes no bit; it waits for memory more than for a processor anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

_LIBRARY = "libtorch_cpu.so"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let torch's loops on this thread use no other threads; those of others go on as before."""
    # `torch.set_num_threads` would also be the number of every thread that begins later.
    set_num_threads, before = _set_num_threads(), torch.get_num_threads()
    if set_num_threads is None or before == 1:
        yield
        return
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(before)


@cache
def _set_num_threads() -> Callable[[int], object] | None:
    """Return OpenMP's own setting for the calling thread, None where torch uses none that we know.

    It is looked up through torch, so that it is that of the library which torch was linked with.
    """
    path = Path(torch.__file__).parent / "lib" / _LIBRARY
    if not path.exists():
        return None
    return getattr(ctypes.CDLL(str(path)), "omp_set_num_threads", None)
