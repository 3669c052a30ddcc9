"""Compile kernels with numba, and keep the machine code where it may be kept.

[Note: a cache is a convenience]
numba keeps compiled kernels in NUMBA_CACHE_DIR, in `__pycache__` beside the source or below the
user's cache directory. By itself it fails at import where none of these can be written (read-only
images, jobs without a home), at the first call where the disk is full, and at every call after a
crash has left half a file. None of this may stop a training: here each only costs a compilation.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_warned = False


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call: without the GIL, without fast-math, cached on disk.

    Dividing by zero gives infinity or NaN as in NumPy. No flag lets LLVM contract or reorder
    floating point, so results are the same for every vector width.

    A cached kernel is renewed when any file of its folder changes. Constants and functions that it
    takes from another folder are frozen into it: keep what a kernel uses beside it.

    Args:
        function: Module-level function of NumPy arrays and scalars.

    Returns:
        The kernel, to be called from any thread.
    """
    kernel: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        kernel._cache = _ForgivingCache(function)
    except (RuntimeError, OSError) as error:  # RuntimeError: numba found no directory to write
        _warn_once(error)
    return kernel


class _ForgivingCache(FunctionCache):
    """The disk cache of one kernel; what it cannot read or write is compiled and forgotten."""

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        """Add to what numba looks at, the kernel's own file, the files it may take code from."""
        folder = Path(inspect.getfile(self._py_func)).parent
        return (*super()._index_key(sig, codegen), _digest_of(folder))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling a file cut short may raise anything
            _logger.info("Compiling anew; %s cannot be read: %r", self.cache_path, error)
            try:
                self.flush()
            except OSError as flush_error:
                _warn_once(flush_error)
                self.disable()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(error)
            self.disable()


@functools.cache
def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _warn_once(error: Exception) -> None:
    global _warned
    with _lock:
        first, _warned = not _warned, True
    if first:
        _logger.warning(
            "Compiled update kernels cannot be kept on disk (%s), so every process compiles them "
            "again, some seconds each. Set NUMBA_CACHE_DIR to a directory that can be written.",
            error,
        )
