"""The peak memory of this process, sampled by a thread."""

from __future__ import annotations

import threading
from pathlib import Path

_STATUS_PATH = Path("/proc/self/status")
_COUNTED_FIELDS = (b"RssAnon:", b"RssShmem:")


def process_memory_bytes() -> int:
    """Return the anonymous and shared bytes of this process; mapped files do not count."""
    total_kib = 0
    for line in _STATUS_PATH.read_bytes().splitlines():
        if line.startswith(_COUNTED_FIELDS):
            total_kib += int(line.split()[1])
    return total_kib * 1024


class MemorySampler:
    """Remembers the largest value of `process_memory_bytes` between start and stop.

    Args:
        interval_s: time between two samples.
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample; the peak starts anew."""
        assert self._thread is None
        self.peak_bytes = process_memory_bytes()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sample once more and end the thread; a second call does nothing."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        self._observe()

    def _sample(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._observe()

    def _observe(self) -> None:
        self.peak_bytes = max(self.peak_bytes, process_memory_bytes())
