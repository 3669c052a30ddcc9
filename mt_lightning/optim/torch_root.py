"""The square root that torch takes of a float32 on this processor.

[Note: torch's roots]
Builds of torch with Intel's library take roots by its `vmsSqrt`, which rounds about one in 150
otherwise than IEEE 754 asks. All others take the processor's own root, which is rounded correctly.
The library is linked into torch, which lets others call it. Nothing is taken on trust: who takes
roots by this function compares the result with torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

HIGH_ACCURACY = 0x2 | 0x140000 | 0x100
"""How torch calls `vmsSqrt`: high accuracy, denormals kept, errors ignored."""

_LIBRARY = "libtorch_cpu.so"


@cache
def root_address() -> int:
    """Return the address of `vmsSqrt(count, source, target, mode)` inside torch, 0 without it."""
    library = _library()
    return ctypes.cast(library.vmsSqrt, ctypes.c_void_p).value or 0 if library else 0


@contextlib.contextmanager
def on_this_thread() -> Iterator[None]:
    """Let Intel's library use no other threads than this one, which it would wake for each root."""
    library = _library()
    if library is None:
        yield
        return
    before = library.MKL_Set_Num_Threads_Local(1)
    try:
        yield
    finally:
        library.MKL_Set_Num_Threads_Local(before)


@cache
def _library() -> ctypes.CDLL | None:
    path = Path(torch.__file__).parent / "lib" / _LIBRARY
    if not (torch.backends.mkl.is_available() and path.exists()):
        return None
    library = ctypes.CDLL(str(path))
    called = ("vmsSqrt", "MKL_Set_Num_Threads_Local")
    return library if all(hasattr(library, name) for name in called) else None
