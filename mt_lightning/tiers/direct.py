"""Reads of page files by kvikio, where a run asks for direct storage and it can be had.

[Note: why the bytes go to the host]
kvikio can read from a drive straight into the memory of a GPU. Pages do not go that way: every
block that is read is compared with its checksum, which the host computes, and the update needs the
page in RAM. So kvikio fills the frames in RAM, with its own threads (its POSIX mode).

[Note: a driver that does not answer]
kvikio asks the CUDA driver about every address. Version 26.10 raises where there is none, but waits
for ever where the driver is there and does not answer. So the driver is asked before.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from typing import Any, Literal

from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.descriptors import OpenFile
from mt_lightning.tiers.header import HEADER_BYTES

log = logging.getLogger(__name__)

DirectStorage = bool | Literal["auto"]
_NUM_THREADS = 4
"""As many as a lane of ours has: two to four saturate a drive."""


class DirectReads:
    """Reads page files by kvikio until it fails once; from then on nobody is asked.

    Args:
        kvikio: The module.

    Attributes:
        num_reads: Reads that it has done.
    """

    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio
        self._lock = threading.Lock()
        self._failed = False
        self.num_reads = 0

    def read(self, file: OpenFile, offset: int, data: memoryview) -> bool:
        """Fill `data` from the payload; False where that has to be done in another way."""
        if self._failed:
            return False
        try:
            future = self._handle(file).pread(data, data.nbytes, HEADER_BYTES + offset)
            done = future.get()
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            self._give_up(file, str(error) or type(error).__name__)
            return False
        if done != data.nbytes:
            self._give_up(file, f"{done} of {data.nbytes} bytes at offset {offset} were read")
            return False
        with self._lock:
            self.num_reads += 1
        return True

    def _handle(self, file: OpenFile) -> Any:
        """Open the file that the descriptor means, whatever its path means by now."""
        with self._lock:
            if file.other is None:
                file.other = self._kvikio.CuFile(f"/proc/self/fd/{file.fd}", "r")
            return file.other

    def _give_up(self, file: OpenFile, why: str) -> None:
        with self._lock:
            told, self._failed = self._failed, True
        if not told:
            log.warning(
                "direct storage is off from now on, and pages are read without kvikio: it could "
                "not read %s (%s). Set direct_storage=False to begin that way.",
                file.path,
                why,
            )


def open_direct(asked: DirectStorage, device_type: str) -> DirectReads | None:
    """Return reads by kvikio, None where they are not asked for or cannot be had.

    Args:
        asked: The setting. True warns where they cannot be had; "auto" asks for them where the run
            computes on a CUDA device, and says so in the log.
        device_type: What the run computes on.
    """
    if not asked or (asked == "auto" and device_type != "cuda"):
        return None
    kvikio, reason = _find()
    if reason is not None:
        tell = log.warning if asked is True else log.info
        tell("direct_storage=%r: pages are read without kvikio, since %s.", asked, reason)
        return None
    log.info("direct storage: pages are read by kvikio %s.", getattr(kvikio, "__version__", ""))
    return DirectReads(kvikio)


def _find() -> tuple[Any, str | None]:
    """Return the module, set up, and why it cannot be used."""
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: libcufile is missing
        return None, f"it cannot be imported ({error}); pip install 'mt-lightning[gds]'"
    reason = driver_refusal()
    if reason is not None:
        return None, reason
    try:
        if "KVIKIO_NTHREADS" not in os.environ:
            defaults.set({"num_threads": _NUM_THREADS})
        # Around the page cache, as all I/O of pages; a block is one task.
        defaults.set({"auto_direct_io_read": True, "task_size": BLOCK_BYTES})
    except (KeyError, ValueError, RuntimeError, AttributeError) as error:
        return None, f"this version cannot be set up ({error!r}); install kvikio 26.10"
    return kvikio, None


def driver_refusal() -> str | None:
    """Return why the CUDA driver cannot be used, None where it answers."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"it needs a CUDA driver ({error})"
    version = ctypes.c_int()
    error = driver.cuDriverGetVersion(ctypes.byref(version))
    return f"the CUDA driver does not answer (error {error})" if error else None
