"""Write a safetensors file from front to back: a header of JSON, then the bytes of each tensor.

Source: https://huggingface.co/docs/safetensors (format). The library's own writer wants every
tensor of a file in memory at once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.export.weights import Weights

_LENGTH = struct.Struct("<Q")
_HEADER_ALIGN_BYTES = 8
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls each dtype."""


def check_dtypes(weights: Weights) -> None:
    """Raise ConfigError, naming the tensor, for a dtype that safetensors does not have."""
    for name, facts in weights.facts().items():
        if facts.dtype not in DTYPES:
            raise ConfigError(f"{name} is {facts.dtype}, which safetensors cannot hold.")


def write_safetensors(
    path: Path,
    weights: Weights,
    names: Sequence[str],
    metadata: Mapping[str, str],
    advance: Callable[[int], None],
) -> None:
    """Write tensors to a new file and make it durable.

    Args:
        path: The file; on an error what was written is removed.
        weights: Where they are read from, one piece after the other.
        names: Which of them.
        metadata: More for the header.
        advance: Called with the number of bytes of each piece that was written.

    Raises:
        StorageError: The file cannot be written, or a tensor cannot be read.
        CorruptPageError: What was read is not what was written once.
    """
    facts = weights.facts()
    # Wide elements first: so each tensor begins on a multiple of its element size.
    order = sorted(names, key=lambda name: -facts[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        start, end = end, end + facts[name].nbytes
        header[name] = {
            "dtype": DTYPES[facts[name].dtype],
            "shape": list(facts[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN_BYTES)
    try:
        with path.open("wb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            for name in order:
                for piece in weights.pieces(name):
                    file.write(piece)
                    advance(piece.nbytes)
            file.flush()
            os.fsync(file.fileno())
            written = file.tell()
        assert written == _LENGTH.size + len(text) + end, (path, written, end)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(
                error.errno, f"cannot write the weights: {error.strerror}", str(path)
            ) from error
        raise
