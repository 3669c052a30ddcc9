"""Frames: anonymous private memory that pages are read into, and the arena that recycles them."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref

import torch

from mt_lightning.errors import BudgetError
from mt_lightning.pages.sizes import align_up
from mt_lightning.tiers.address import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    address_of,
    advise,
    map_anonymous,
)

log = logging.getLogger(__name__)


def use_count(storage_cdata: int) -> int:
    """Return how many tensors (and Python wrappers) hold the storage at this C address."""
    return torch._C._storage_Use_Count(storage_cdata)  # pyright: ignore[reportAttributeAccessIssue]


class Frame:
    """A piece of host memory that one page's bytes live in. Contents are undefined when handed out.

    Attributes:
        nbytes: size, a multiple of `ALIGN_BYTES`.
        tensor: `[nbytes]` uint8 on the host; every view of it shares one storage.
        memory: the same bytes, writable, for I/O. Its slices are not seen by `in_use`.
    """

    __slots__ = ("_cdata", "_mapping", "_resting_count", "_storage", "memory", "nbytes", "tensor")

    nbytes: int
    tensor: torch.Tensor
    memory: memoryview

    def __init__(self, nbytes: int) -> None:
        """Map at least `nbytes` bytes.

        Raises:
            OSError: the kernel has no memory or address space left.
        """
        self.nbytes = align_up(max(nbytes, 1))
        huge = self.nbytes >= HUGE_PAGE_BYTES
        mapping = map_anonymous(self.nbytes, HUGE_PAGE_BYTES if huge else PAGE_BYTES)
        self._mapping = weakref.ref(mapping)
        self.memory = memoryview(mapping).cast("B")
        address = address_of(self.memory)
        # A forked DataLoader worker would make these pages copy-on-write: the parent's next write
        # moves them, and a direct read in flight lands in the copy that nobody sees.
        advise(address, self.nbytes, getattr(mmap, "MADV_DONTFORK", None))
        # Only whole huge pages: the tail would otherwise take up to 2 MiB more than `nbytes`.
        whole_bytes = self.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        advise(address, whole_bytes, getattr(mmap, "MADV_HUGEPAGE", None))
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        # The wrapper is kept: making one later would itself count as a use.
        self._storage = self.tensor.untyped_storage()
        self._cdata = self._storage._cdata
        self._resting_count = use_count(self._cdata)

    def in_use(self) -> bool:
        """Tell whether a view of `tensor` lives somewhere: in autograd, in a parameter, in a local.

        `tensor` itself held by someone else, and slices of `memory`, do not count.
        """
        return use_count(self._cdata) > self._resting_count

    def _drop(self) -> bool:
        """Give up the memory; return whether it really went back to the kernel."""
        del self.tensor, self._storage, self.memory
        return self._mapping() is None


class Arena:
    """The frames of one owner. Freed frames are kept for the next request of the same size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, Frame] = {}
        self._free: dict[int, list[Frame]] = {}
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all frames, handed out or kept for reuse."""
        return self._held_bytes

    def alloc(self, nbytes: int) -> Frame:
        """Hand out a frame of at least `nbytes` bytes, recycled if one of that size is free.

        Raises:
            BudgetError: the kernel has no memory left.
        """
        rounded_bytes = align_up(max(nbytes, 1))
        with self._lock:
            free = self._free.get(rounded_bytes)
            if free:
                frame = free.pop()
            else:
                try:
                    frame = Frame(rounded_bytes)
                except OSError as error:
                    raise BudgetError(
                        f"cannot map a frame of {rounded_bytes} bytes ({error.strerror}); the "
                        f"arena already holds {self._held_bytes} bytes; lower max_ram_gb"
                    ) from error
                self._held_bytes += rounded_bytes
            self._live[id(frame)] = frame
            return frame

    def forget(self, frame: Frame) -> None:
        """Stop counting a frame that somebody still has views of; it goes back when they die."""
        with self._lock:
            assert self._live.pop(id(frame), None) is frame, "freed twice, or not from this arena"
            self._held_bytes -= frame.nbytes

    def has_free(self, nbytes: int) -> bool:
        """Tell whether `alloc(nbytes)` would reuse a free frame."""
        return bool(self._free.get(align_up(max(nbytes, 1))))

    def free(self, frame: Frame) -> None:
        """Take a frame back; it must be one of ours and no view of it may live."""
        assert not frame.in_use(), f"a frame of {frame.nbytes} bytes was freed while a view lives"
        with self._lock:
            assert self._live.pop(id(frame), None) is frame, "freed twice, or not from this arena"
            self._free.setdefault(frame.nbytes, []).append(frame)

    def trim(self, nbytes: int | None = None) -> int:
        """Return free frames to the kernel, largest first, until `nbytes` (None: all) went back.

        Returns:
            The bytes returned.
        """
        returned_bytes = 0
        with self._lock:
            for size in sorted(self._free, reverse=True):
                while self._free[size] and (nbytes is None or returned_bytes < nbytes):
                    frame = self._free[size].pop()
                    self._held_bytes -= size
                    returned_bytes += size
                    if not frame._drop():
                        log.debug("a frame of %d bytes goes back when its last holder dies", size)
                if not self._free[size]:
                    del self._free[size]
        return returned_bytes

    def close(self) -> None:
        """Return every free frame. A frame still out goes back when its holder drops it."""
        self.trim()
        with self._lock:
            self._held_bytes -= sum(frame.nbytes for frame in self._live.values())
            self._live.clear()
