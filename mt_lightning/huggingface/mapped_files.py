"""Whether memory is that of a mapped file, which the kernel can drop and read again."""

from __future__ import annotations

import bisect
from pathlib import Path

import torch

_MAPS_PATH = Path("/proc/self/maps")
_IN_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV")

_starts: list[int] = []
_stops: list[int] = []


def is_file_backed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's first byte lies in a mapping of a file on a drive."""
    address = tensor.data_ptr()
    if _find(address):
        return True
    _read_maps()
    return _find(address)


def _find(address: int) -> bool:
    at = bisect.bisect_right(_starts, address) - 1
    return at >= 0 and address < _stops[at]


def _read_maps() -> None:
    starts, stops = [], []
    for line in _MAPS_PATH.read_text().splitlines():
        parts = line.split(maxsplit=5)
        name = parts[5] if len(parts) > 5 else ""
        if name.startswith("/") and not name.startswith(_IN_MEMORY):
            start, stop = (int(each, 16) for each in parts[0].split("-"))
            starts.append(start)
            stops.append(stop)
    _starts[:], _stops[:] = starts, stops
