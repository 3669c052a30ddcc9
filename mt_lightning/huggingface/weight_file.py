"""A file without a name, for weights that are made while a checkpoint is loaded."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import weakref

import torch

from mt_lightning.errors import StorageError
from mt_lightning.export.weights import bytes_of
from mt_lightning.pages.sizes import ALIGN_BYTES, align_up
from mt_lightning.tiers.address import map_file
from mt_lightning.tiers.mapping import PrivateMapping

_PIECE_BYTES = 1 << 26
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


class WeightFile:
    """Holds tensors on disk; its space is free again when the last of them is gone.

    Args:
        directory: Where it lies.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._fd: int | None = None
        self._end = 0
        self._lock = threading.Lock()
        self._rooms: dict[int, tuple[int, int]] = {}
        """Offset and length of rooms that live, by the address of their first byte."""
        self._kept: set[int] = set()

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a private mapping of a copy of a tensor.

        Raises:
            StorageError: The drive is full or cannot be written to.
        """
        flat = tensor.detach().contiguous()
        data = bytes_of(flat)
        try:
            fd, offset = self._reserve(data.nbytes)
            done = 0
            while done < data.nbytes:
                done += os.pwrite(fd, data[done : done + _PIECE_BYTES], offset + done)
            return _shown(fd, offset, flat)
        except OSError as error:
            raise self._failed(error, data.nbytes) from error

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose memory is that of the file, to be filled.

        Raises:
            StorageError: The drive is full or cannot be written to.
        """
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        try:
            fd, offset = self._reserve(nbytes)
            memory = map_file(fd, offset, nbytes, shared=True)
        except OSError as error:
            raise self._failed(error, nbytes) from error
        address = ctypes.addressof(memory)
        self._rooms[address] = (offset, nbytes)
        weakref.finalize(memory, self._release, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a private mapping of a room that was filled, None for any other tensor."""
        offset, nbytes = self._rooms.get(tensor.data_ptr(), (0, -1))
        if nbytes != tensor.nbytes or not tensor.is_contiguous():
            return None
        assert self._fd is not None
        self._kept.add(offset)
        return _shown(self._fd, offset, tensor)

    def close(self) -> None:
        """Give the descriptor back; tensors keep their mappings."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        with self._lock:
            if self._fd is None:
                os.makedirs(self._directory, exist_ok=True)
                self._fd, name = tempfile.mkstemp(prefix=".loading-", dir=self._directory)
                os.unlink(name)
            offset, self._end = self._end, align_up(self._end + nbytes, ALIGN_BYTES)
        # Now or never: a mapping of a file that cannot grow kills the process.
        os.posix_fallocate(self._fd, offset, nbytes)
        return self._fd, offset

    def _release(self, address: int) -> None:
        """Give the space of a room back that nothing was kept of."""
        offset, nbytes = self._rooms.pop(address)
        if offset not in self._kept and self._fd is not None:
            # Where a file system cannot do this, the space is free when the file is gone.
            _libc.fallocate(
                self._fd,
                _KEEP_SIZE | _PUNCH_HOLE,
                ctypes.c_int64(offset),
                ctypes.c_int64(nbytes),
            )

    def _failed(self, error: OSError, nbytes: int) -> StorageError:
        return StorageError(
            error.errno,
            f"cannot write {nbytes} bytes of a weight that is loaded: {error.strerror}. Free some "
            "space, or give mt.init another offload_dir",
            self._directory,
        )


def _shown(fd: int, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    mapping = PrivateMapping.of_file(fd, offset, tensor.nbytes)
    return mapping.tensor(0, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
