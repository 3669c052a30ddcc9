"""Memory mappings of the C library, as buffers that unmap themselves when their last view dies.

[Note: Why not Python's mmap] It duplicates the file descriptor of every mapping it makes, so a
thousand mapped pages would hold a thousand descriptors; it cannot place a mapping on a 2 MiB
boundary; and its `close()` does not see a tensor made by `torch.frombuffer`. Here the lifetime is
Python's own: whoever holds a view holds the mapping, and nothing else does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20


def map_anonymous(nbytes: int, alignment: int = PAGE_BYTES) -> ctypes.Array:
    """Map private anonymous memory.

    Args:
        nbytes: size of the mapping.
        alignment: the first byte lies on a multiple of this; a multiple of the page size.

    Returns:
        A writable array of unsigned bytes, all zero; unmapped when its last view dies.

    Raises:
        OSError: the kernel refused; `errno` says why.
    """
    length = _round_up(nbytes)
    spare = alignment - PAGE_BYTES
    whole = _mmap(length + spare, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-whole // alignment) * alignment
    if address > whole:
        _libc.munmap(whole, address - whole)
    if whole + spare > address:
        _libc.munmap(address + length, whole + spare - address)
    return _own(address, length, nbytes)


def map_file(fd: int, offset: int, nbytes: int, *, shared: bool = False) -> ctypes.Array:
    """Map a file range, readable and writable.

    Args:
        fd: an open descriptor; it may be closed afterwards.
        offset: first byte in the file, a multiple of the page size.
        nbytes: length of the range.
        shared: whether what is written goes to the file; else it is copied (copy-on-write).

    Raises:
        OSError: the kernel refused; `errno` says why.
    """
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    address = _mmap(_round_up(nbytes), flags, fd, offset)
    return _own(address, _round_up(nbytes), nbytes)


def advise(address: int, nbytes: int, advice: int | None) -> None:
    """Give a hint about a range; a kernel without that hint is no error."""
    if advice is not None and nbytes > 0:
        _libc.madvise(address, nbytes, advice)


def address_of(buffer: memoryview) -> int:
    """Return the address of the first byte of contiguous bytes."""
    return np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _mmap(length: int, flags: int, fd: int, offset: int) -> int:
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {length} bytes failed: {os.strerror(code)}")
    return address


def _own(address: int, length: int, nbytes: int) -> ctypes.Array:
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    # Every buffer export holds a reference to the array, so this runs after the last view died.
    weakref.finalize(array, _unmap, address, length, os.getpid()).atexit = False
    return array


def _unmap(address: int, length: int, owner_pid: int) -> None:
    # After a fork the range may not exist in the child (MADV_DONTFORK) or belong to something else.
    if os.getpid() == owner_pid:
        _libc.munmap(address, length)
