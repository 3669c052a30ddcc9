"""Streams: bytes of float32 state to fewer bytes and back, in chunks that are coded one by one.

    header     magic[4], format version (uint32), raw bytes (uint64)
    index      for each chunk of 1 MiB its stored bytes (uint32)
    chunks     one after the other

Integers are little-endian. A chunk of zeros stores nothing. One that would not shrink is stored as
it is. Any other holds the kinds and the bases of its blocks of 512 bytes, their records, and as
they are the bytes that fill no block.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from mt_lightning.errors import CorruptPageError
from mt_lightning.optim.lossless.pack import encode_blocks
from mt_lightning.optim.lossless.records import BLOCK_BYTES
from mt_lightning.optim.lossless.unpack import decode_blocks

CHUNK_BYTES = 1 << 20

_HEADER = struct.Struct("<4sIQ")
_MAGIC, _VERSION = b"MTLS", 1


def max_encoded(nbytes: int) -> int:
    """Return how many bytes `nbytes` of state take at most."""
    return _HEADER.size + 4 * _num_chunks(nbytes) + nbytes


def encode(raw: torch.Tensor, out: torch.Tensor) -> int:
    """Code `raw`, whatever its bytes; the same bytes always give the same stream.

    One thread does the work, without the GIL; calls may run in any number of threads.

    Args:
        raw: uint8, 1-D, contiguous, in RAM: float32 values in native order, and any other bytes
            correctly but to no gain.
        out: uint8, 1-D, contiguous, in RAM, at least `max_encoded(raw.numel())` bytes; must not
            overlap `raw`. What lies behind the stream is undefined afterwards.

    Returns:
        How many bytes of `out` the stream takes.
    """
    source, target = _bytes_of(raw, "raw"), _bytes_of(out, "out")
    needed = max_encoded(source.size)
    if target.size < needed:
        raise ValueError(
            f"Lossless coding of {source.size} bytes may take {needed} and has {target.size}. "
            "Give it max_encoded(nbytes) bytes."
        )
    num_chunks = _num_chunks(source.size)
    lengths = np.zeros(num_chunks, "<u4")
    used = start = _HEADER.size + lengths.nbytes
    for index in range(num_chunks):
        chunk = source[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        lengths[index] = _encode_chunk(chunk, target[used : used + chunk.size])
        used += int(lengths[index])
    target[: _HEADER.size] = np.frombuffer(
        _HEADER.pack(_MAGIC, _VERSION, source.size), dtype=np.uint8
    )
    target[_HEADER.size : start] = lengths.view(np.uint8)
    return used


def decode(stored: torch.Tensor, raw_out: torch.Tensor) -> None:
    """Restore what `encode` was given.

    Args:
        stored: uint8, 1-D, contiguous, in RAM: a stream, and behind it any bytes.
        raw_out: uint8, 1-D, contiguous, in RAM, as long as what was coded; must not overlap
            `stored`.

    Raises:
        CorruptPageError: `stored` is no stream of `raw_out.numel()` bytes, or its parts do not fit
            each other. `raw_out` is undefined then. Bits that flip without changing a length go
            unnoticed: checksums are the business of who stores the bytes.
    """
    source, target = _bytes_of(stored, "stored"), _bytes_of(raw_out, "raw_out")
    num_chunks = _num_chunks(target.size)
    used = _HEADER.size + 4 * num_chunks
    if source.size < used:
        raise _corrupt(
            f"it has {source.size} bytes, fewer than its header and index of {used} bytes"
        )
    magic, version, nbytes = _HEADER.unpack(source[: _HEADER.size].tobytes())
    if magic != _MAGIC or version != _VERSION:
        raise _corrupt(
            f"it starts with {magic!r}, version {version}, instead of {_MAGIC!r}, {_VERSION}"
        )
    if nbytes != target.size:
        raise _corrupt(f"it holds {nbytes} bytes of state and {target.size} are asked for")
    lengths = np.frombuffer(source[_HEADER.size : used].tobytes(), dtype="<u4")
    for index in range(num_chunks):
        length = int(lengths[index])
        if used + length > source.size:
            raise _corrupt(f"chunk {index} ends at byte {used + length} of {source.size}")
        chunk = target[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        if not _decode_chunk(source[used : used + length], chunk):
            raise _corrupt(f"the {length} bytes of chunk {index} do not fit each other")
        used += length


def _num_chunks(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


def _encode_chunk(chunk: np.ndarray, room: np.ndarray) -> int:
    """Code `chunk` into `room` of the same size; return the bytes used."""
    num_blocks = chunk.size // BLOCK_BYTES
    rest = chunk[num_blocks * BLOCK_BYTES :]
    work = room if room.ctypes.data % 2 == 0 else np.empty_like(room)
    kinds, bases, records, halves = _parts(work, num_blocks, work.size - rest.size)
    words = _aligned(chunk[: num_blocks * BLOCK_BYTES], 4).view(np.uint32)
    used = encode_blocks(words, kinds, bases, records, halves)
    if used == 0 and not kinds.any() and not rest.any():
        return 0
    length = 2 * num_blocks + used + rest.size
    if used < 0 or length >= chunk.size:
        room[:] = chunk
        return chunk.size
    work[length - rest.size : length] = rest
    if work is not room:
        room[:length] = work[:length]
    return length


def _decode_chunk(stored: np.ndarray, chunk: np.ndarray) -> bool:
    """Write `chunk`; return whether `stored` is well formed."""
    if stored.size == 0:
        chunk[:] = 0
        return True
    if stored.size == chunk.size:
        chunk[:] = stored
        return True
    num_blocks = chunk.size // BLOCK_BYTES
    num_rest = chunk.size - num_blocks * BLOCK_BYTES
    if stored.size < 2 * num_blocks + num_rest:
        return False
    kinds, bases, records, halves = _parts(_aligned(stored, 2), num_blocks, stored.size - num_rest)
    blocks = chunk[: num_blocks * BLOCK_BYTES]
    words = blocks if blocks.ctypes.data % 4 == 0 else np.empty_like(blocks)
    if not decode_blocks(kinds, bases, records, halves, words.view(np.uint32)):
        return False
    if words is not blocks:
        blocks[:] = words
    chunk[blocks.size :] = stored[stored.size - num_rest :]
    return True


def _parts(coded: np.ndarray, num_blocks: int, end: int) -> tuple[np.ndarray, ...]:
    """Return kinds, bases and records of a chunk, the records also as halves of words."""
    records = coded[2 * num_blocks : end]
    halves = records[: records.size // 2 * 2].view(np.uint16)
    return coded[:num_blocks], coded[num_blocks : 2 * num_blocks], records, halves


def _aligned(data: np.ndarray, alignment: int) -> np.ndarray:
    """Return `data`, copied where its address is not a multiple of `alignment`."""
    return data if data.ctypes.data % alignment == 0 else data.copy()


def _bytes_of(tensor: torch.Tensor, name: str) -> np.ndarray:
    if (
        tensor.dtype != torch.uint8
        or tensor.dim() != 1
        or not tensor.is_contiguous()
        or tensor.device.type != "cpu"
    ):
        raise ValueError(
            f"{name} is a {tuple(tensor.shape)} tensor of {tensor.dtype} on {tensor.device}; "
            "lossless coding takes contiguous 1-D tensors of uint8 in RAM. Call "
            f"{name}.flatten().view(torch.uint8)."
        )
    return tensor.detach().numpy()


def _corrupt(what: str) -> CorruptPageError:
    return CorruptPageError(
        f"Losslessly coded optimizer state cannot be read: {what}. It is damaged or was written by "
        "another version; restore it from an earlier checkpoint."
    )
