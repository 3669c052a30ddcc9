"""The first 4096 bytes of every page file: what the file is, so that no other is taken for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import xxhash

from mt_lightning.errors import CorruptPageError
from mt_lightning.pages.sizes import ALIGN_BYTES

HEADER_BYTES = ALIGN_BYTES
FORMAT_VERSION = 1
_MAGIC = b"MTPAGE\r\n"  # the line end shows a file that went through a text filter
_PREFIX = struct.Struct("<8sII")  # magic, format version, bytes of JSON
_SUM = struct.Struct("<Q")  # xxh3_64 of everything before it, in the last 8 bytes


def encode_header(name: str, payload_bytes: int, facts: Mapping[str, object]) -> bytes:
    """Build the header of a page file.

    Args:
        name: name of the file within its store.
        payload_bytes: bytes that follow the header.
        facts: more that must agree when the file is opened again; JSON values.
    """
    text = json.dumps(_fields(name, payload_bytes, facts), sort_keys=True).encode()
    body = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(text)) + text
    assert len(body) <= HEADER_BYTES - _SUM.size, f"header of {name} is too long: {len(body)} bytes"
    body = body.ljust(HEADER_BYTES - _SUM.size, b"\0")
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def check_header(data: bytes, name: str, facts: Mapping[str, object], path: str) -> int:
    """Check the header of a page file.

    Args:
        data: the first `HEADER_BYTES` of the file.
        name: what the file should be called.
        facts: what the header should say besides.
        path: where the file lies, for the message.

    Returns:
        The payload bytes that the header states.

    Raises:
        CorruptPageError: something differs; the message names what.
    """
    if len(data) != HEADER_BYTES:
        raise _differs(path, "length", f"{HEADER_BYTES} header bytes", f"{len(data)}")
    magic, version, text_bytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise _differs(path, "magic", repr(_MAGIC), repr(magic))
    if version != FORMAT_VERSION:
        raise _differs(path, "format version", str(FORMAT_VERSION), str(version))
    body = data[: -_SUM.size]
    if _SUM.unpack(data[-_SUM.size :])[0] != xxhash.xxh3_64_intdigest(body):
        raise _differs(path, "header checksum", "the sum of its bytes", "another")
    try:
        found = json.loads(body[_PREFIX.size : _PREFIX.size + text_bytes])
        payload_bytes = int(found["payload_bytes"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _differs(path, "header", "JSON fields", str(error)) from None
    expected = json.loads(json.dumps(_fields(name, payload_bytes, facts)))
    for field in sorted(expected.keys() | found.keys()):
        if found.get(field) != expected.get(field):
            raise _differs(path, field, repr(expected.get(field)), repr(found.get(field)))
    return payload_bytes


def _fields(name: str, payload_bytes: int, facts: Mapping[str, object]) -> dict[str, object]:
    return {**facts, "name": name, "payload_bytes": payload_bytes}


def _differs(path: str, what: str, expected: str, found: str) -> CorruptPageError:
    return CorruptPageError(
        None,
        f"not the page file it should be: {what} differs (expected {expected}, found {found}); "
        "give another offload_dir, or on_existing='overwrite' to start anew",
        path,
    )
