"""Private, writable views of a file's bytes: what a parameter shows while no run has its page."""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from mt_lightning.errors import StorageError
from mt_lightning.pages.sizes import ALIGN_BYTES, BLOCK_BYTES
from mt_lightning.tiers.address import PAGE_BYTES, address_of, map_anonymous, map_file

if TYPE_CHECKING:
    from mt_lightning.tiers.origins import Seal

# /proc/self/pagemap: one 64-bit word per page.
_PRESENT = np.uint64(1 << 63)
_SWAPPED = np.uint64(1 << 62)
_OF_FILE = np.uint64(1 << 61)
_ENTRIES_PER_READ = 1 << 17  # 1 MiB of pagemap: 512 MiB of mapping


class LiveViews:
    """Which tensors of a mapping still live. Outlives the mapping; holds nothing alive.

    Attributes:
        named: whether the mapping shows a payload that still has its name.
        seal: the checksums of that payload, once somebody tells them.
    """

    def __init__(self) -> None:
        self._views: list[weakref.ref[memoryview]] = []
        self.named = False
        self.seal: Seal | None = None

    def add(self, view: memoryview) -> None:
        """Watch one more view."""
        self._views.append(weakref.ref(view))

    def any(self) -> bool:
        """Tell whether a tensor over one of the views still lives."""
        self._views = [ref for ref in self._views if ref() is not None]
        return bool(self._views)


class PrivateMapping:
    """A copy-on-write mapping of bytes, from which tensors are cut.

    Needs no descriptor and, until somebody writes, no memory of its own. The mapped inode stays as
    it is even when its name is given to another file.

    Attributes:
        nbytes: length of the mapped range.
        address: its first byte.
        views: the tensors cut from it that still live.
    """

    def __init__(self, memory: memoryview, pristine: memoryview | None) -> None:
        """Wrap mapped bytes; use `of_file` or `of_bytes`.

        Args:
            memory: the mapped bytes, writable.
            pristine: the same bytes as they were, or None to ask the kernel which pages changed.
        """
        self.nbytes = memory.nbytes
        self.address = address_of(memory)
        self.views = LiveViews()
        self._memory = memory
        self._pristine = pristine

    @classmethod
    def of_file(cls, fd: int, offset: int, nbytes: int) -> PrivateMapping:
        """Map `nbytes` bytes of a file from `offset` on.

        Raises:
            OSError: the kernel refused the mapping.
        """
        skip = offset % PAGE_BYTES  # not zero only where pages are larger than 4 KiB
        window = slice(skip, skip + nbytes)

        def view() -> memoryview:
            return memoryview(map_file(fd, offset - skip, skip + nbytes)).cast("B")[window]

        return cls(view(), None if pagemap_is_trustworthy() else view().toreadonly())

    @classmethod
    def of_bytes(cls, data: bytes) -> PrivateMapping:
        """Make a "mapping" of bytes that lie in memory, by copying them."""
        memory = memoryview(map_anonymous(len(data))).cast("B")
        memory[:] = data
        return cls(memory, memoryview(data))

    @property
    def alive(self) -> bool:
        """Whether a tensor cut from this mapping still lives."""
        return self.views.any()

    def is_pristine(self) -> bool:
        """Tell whether nobody has written to it; False where finding out takes long."""
        return self._pristine is None and not self.written_ranges()

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Cut out a tensor with a storage of its own.

        Args:
            offset: first byte, relative to the mapping.
            nbytes: number of bytes.

        Returns:
            `[nbytes]` uint8 on the host, writable; it keeps the mapping alive.
        """
        assert 0 <= offset <= offset + nbytes <= self.nbytes, (offset, nbytes, self.nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        view = self._memory[offset : offset + nbytes]
        self.views.add(view)
        return torch.frombuffer(view, dtype=torch.uint8)

    def written_ranges(self) -> list[tuple[int, int]]:
        """Return the byte ranges (start, stop) that somebody has written to, in page granularity.

        Raises:
            StorageError: the kernel's page map cannot be read.
        """
        if self._pristine is not None:
            return self.differing_ranges(self._pristine)
        return copied_ranges(self.address, self.nbytes)

    def differing_ranges(self, other: memoryview) -> list[tuple[int, int]]:
        """Return the byte ranges in which `other`, of the same length, is not as this one is."""
        return _merge(_changed_blocks(self._memory, other), ALIGN_BYTES, 0, self.nbytes)


def copied_ranges(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) of a private mapping that are copies, by the page map.

    Raises:
        StorageError: the kernel's page map cannot be read.
    """
    skip = address % PAGE_BYTES
    try:
        return _merge(_copied_pages(address - skip, skip + nbytes), PAGE_BYTES, skip, nbytes)
    except OSError as error:
        raise StorageError(
            error.errno,
            f"cannot tell which of {nbytes} mapped bytes were written: {error.strerror}",
            "/proc/self/pagemap",
        ) from error


@functools.cache
def pagemap_is_trustworthy() -> bool:
    """Try the page map on a small file: one page read, one written, one left alone."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(3 * PAGE_BYTES))
            file.flush()
            memory = memoryview(map_file(file.fileno(), 0, 3 * PAGE_BYTES)).cast("B")
            assert memory[0] == 0
            memory[PAGE_BYTES] = 1
            copied = np.concatenate(list(_copied_pages(address_of(memory), memory.nbytes)))
            return copied.tolist() == [False, True, False]
    except OSError:
        return False


def _copied_pages(address: int, nbytes: int) -> Iterator[np.ndarray]:
    """Yield, page by page in long runs, whether a page is a private copy."""
    num_pages = -(-nbytes // PAGE_BYTES)
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first in range(0, num_pages, _ENTRIES_PER_READ):
            count = min(_ENTRIES_PER_READ, num_pages - first)
            data = os.pread(fd, 8 * count, 8 * (address // PAGE_BYTES + first))
            if len(data) != 8 * count:
                raise OSError(0, f"short read of the page map: {len(data)} of {8 * count} bytes")
            words = np.frombuffer(data, dtype=np.uint64)
            in_memory = (words & (_PRESENT | _SWAPPED)) != 0
            yield in_memory & ((words & _OF_FILE) == 0)
    finally:
        os.close(fd)


def _changed_blocks(memory: memoryview, pristine: memoryview) -> Iterator[np.ndarray]:
    """Yield, block by block in long runs, whether a block differs: the slow reference."""
    for start in range(0, memory.nbytes, BLOCK_BYTES):
        now = np.frombuffer(memory[start : start + BLOCK_BYTES], dtype=np.uint8)
        then = np.frombuffer(pristine[start : start + BLOCK_BYTES], dtype=np.uint8)
        differs = now != then
        yield np.logical_or.reduceat(differs, np.arange(0, len(differs), ALIGN_BYTES))


def _merge(
    runs: Iterable[np.ndarray], unit_bytes: int, skip_bytes: int, nbytes: int
) -> list[tuple[int, int]]:
    """Turn flags per unit into byte ranges, less `skip_bytes` and cut to [0, nbytes)."""
    ranges: list[tuple[int, int]] = []
    first = 0
    for flags in runs:
        edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
        for start, stop in (edges.reshape(-1, 2) + first).tolist():
            begin = max(start * unit_bytes - skip_bytes, 0)
            end = min(stop * unit_bytes - skip_bytes, nbytes)
            if ranges and ranges[-1][1] == begin:
                begin = ranges.pop()[0]
            ranges.append((begin, end))
        first += len(flags)
    return ranges
