"""Whether memory is that of a mapped file, which the kernel can drop and read again."""

from __future__ import annotations

from pathlib import Path

import torch

_MAPS_PATH = Path("/proc/self/maps")
_IN_MEMORY = (b"/dev/shm/", b"/memfd:", b"/SYSV")


def is_file_backed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's first byte lies in a mapping of a file on a drive.

    The kernel is asked each time: the addresses of what was freed are used again.
    """
    address = tensor.data_ptr()
    for line in _MAPS_PATH.read_bytes().splitlines():
        start, _, rest = line.partition(b"-")
        if int(start, 16) > address:
            return False
        if address < int(rest.partition(b" ")[0], 16):
            parts = line.split(maxsplit=5)
            name = parts[5] if len(parts) > 5 else b""
            return name.startswith(b"/") and not name.startswith(_IN_MEMORY)
    return False
