"""Read the manifest of a linked checkpoint without trusting it.

Every value is checked before it is used, names of files are plain names, and a checksum over
everything shows damage.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.tiers.checkpoint_files import FOLDER
from mt_lightning.tiers.coding import CodedChunk, Coding
from mt_lightning.tiers.manifest import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    Manifest,
    PageFile,
    TensorPlace,
    sum_of,
)

_MAX_BYTES = 1 << 30
_MAX_EXPANSION = 1 << 10
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_HEX = re.compile(r"(?:[0-9a-f]{16})*")


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file begins as a manifest does; nothing else is looked at."""
    try:
        with open(path, "rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def read_manifest(path: str | os.PathLike[str], places: Iterable[Path] = ()) -> Manifest:
    """Read a manifest and find the folders that it names.

    Args:
        path: The manifest.
        places: Further offload directories in which its folders may be.

    Raises:
        ConfigError: It is no manifest, of another version, or damaged.
        StorageError: A folder is missing.
    """
    manifest = parse_manifest(path)
    folders = find_folders(path, manifest, places)
    for (_, directory), folder in zip(manifest.directories, folders, strict=True):
        if folder is None:
            raise StorageError(
                errno.ENOENT,
                f"the folder {FOLDER}/{manifest.checkpoint_id} of this checkpoint is missing: it "
                f"was in {directory}, and is neither there nor at the same place as seen from the "
                "manifest. Move the offload_dir together with the manifest, or pass its new place "
                "as offload_dir",
                str(path),
            )
    return replace(manifest, folders=tuple(f for f in folders if f is not None))


def find_folders(
    path: str | os.PathLike[str], manifest: Manifest, places: Iterable[Path] = ()
) -> list[Path | None]:
    """Return the folder of each of a manifest's directories, None where it is missing."""
    base = Path(os.path.realpath(path)).parent
    more = [Path(place) for place in places]
    found: list[Path | None] = []
    for relative, absolute in manifest.directories:
        candidates = [base / relative, Path(absolute), *more]
        folders = [place / FOLDER / manifest.checkpoint_id for place in candidates]
        # Several directories of one run may all be among `places`: each has its own folder.
        fresh = [each for each in folders if os.path.isdir(each) and each not in found]
        found.append(fresh[0] if fresh else None)
    return found


def parse_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read a manifest without looking for its folders.

    Raises:
        ConfigError: It is no manifest, of another version, or damaged.
        StorageError: It cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot read the manifest: {error.strerror}", str(path)
        ) from error
    if len(data) > _MAX_BYTES:
        raise _damaged(path, f"it is larger than {_MAX_BYTES} bytes")
    try:
        document = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f"{path} is no checkpoint: it is JSON, but not of format {FORMAT!r}.")
    version = document.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} is a linked checkpoint of version {version!r}; this release reads "
            f"{FORMAT_VERSION}. Use the release that wrote it."
        )
    try:
        stated, content = document["sum"], document["content"]
        if stated != f"{sum_of(content):016x}":
            raise _damaged(path, "its checksum is wrong")
        return _manifest_of(content)
    except _InvalidError as error:
        raise _damaged(path, str(error)) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error


class _InvalidError(Exception):
    pass


def _damaged(path: str | os.PathLike[str], why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be loaded as a linked checkpoint: the manifest is damaged: {why}. Restore "
        "it from a copy, or use another checkpoint."
    )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise _InvalidError(what)


def _text(value: Any, what: str) -> str:
    _check(isinstance(value, str) and "\0" not in value, f"{what} is {value!r:.60}")
    os.fsencode(value)  # a ValueError, where it is no name
    return value


def _name(value: Any, what: str) -> str:
    plain = isinstance(value, str) and _NAME.fullmatch(value) is not None
    _check(plain, f"{what} {value!r:.60} is not a plain name")
    return value


def _count(value: Any, what: str) -> int:
    _check(type(value) is int and 0 <= value < 1 << 60, f"{what} is {value!r:.60}")
    return value


def _list(value: Any, what: str, length: int | None = None) -> list[Any]:
    fits = isinstance(value, list) and (length is None or len(value) == length)
    _check(fits, f"{what} is {value!r:.60}")
    return value


def _manifest_of(content: Any) -> Manifest:
    _check(isinstance(content, dict), "it has no content")
    directories = []
    for pair in _list(content["directories"], "the list of directories"):
        relative, absolute = _list(pair, "a directory", 2)
        directories.append((_text(relative, "a directory"), _text(absolute, "a directory")))
    _check(bool(directories), "it names no directory")
    _check(isinstance(content["files"], dict), "it has no files")
    files = {
        _name(name, "the file name"): _file_of(name, entry, len(directories))
        for name, entry in content["files"].items()
    }
    covered = {name: _covered(file) for name, file in files.items()}
    entries = _list(content["tensors"], "the list of tensors")
    tensors = [_tensor_of(entry, files, covered) for entry in entries]
    rest, nbytes, value = _list(content["rest"], "the file of everything else", 3)
    _check(_name(rest, "the file name") not in files, f"{rest} is named twice")
    return Manifest(
        checkpoint_id=_name(content["id"], "the id"),
        home=_text(content["home"], "its home"),
        directories=tuple(directories),
        files=files,
        tensors=tuple(tensors),
        rest=(rest, _count(nbytes, f"the length of {rest}"), _sums(value, 1)[0]),
    )


def _file_of(name: str, entry: Any, num_directories: int) -> PageFile:
    directory, nbytes, pieces, sums, coding = _list(entry, f"file {name}", 5)
    _check(_count(directory, "a directory") < num_directories, f"{name} is in no directory")
    _check(_count(nbytes, "a length") > 0 and nbytes % ALIGN_BYTES == 0, f"{name}: {nbytes} bytes")
    ranges = _ranges(pieces, nbytes, name)
    file = PageFile(directory, nbytes, ranges, ())
    return replace(file, sums=_sums(sums, file.num_blocks), coding=_coding_of(coding, file, name))


def _ranges(pieces: Any, nbytes: int, name: str) -> tuple[tuple[int, int], ...]:
    ranges = []
    for piece in _list(pieces, "the pieces"):
        offset, length = _list(piece, "a piece", 2)
        _check(_count(offset, "an offset") + _count(length, "a length") <= nbytes, f"{name} ends")
        ranges.append((offset, length))
    return tuple(ranges)


def _coding_of(entry: Any, file: PageFile, name: str) -> Coding | None:
    if entry is None:
        return None
    codec, plain_bytes, streams = _list(entry, f"the coding of {name}", 3)
    # No codec makes more of a file than that: a plane of any other size is not meant.
    most = _MAX_EXPANSION * file.nbytes
    _check(0 < _count(plain_bytes, "a length") <= most, f"{name} expands to {plain_bytes!r} bytes")
    chunks, summed = [], _joined(file.pieces)
    for stream in _list(streams, "the streams"):
        offset, length, pieces = _list(stream, "a stream", 3)
        end = _count(offset, "an offset") + _count(length, "a length")
        _check(_is_covered(offset, end, summed), f"{name} has no checksum at {offset}")
        chunks.append(CodedChunk(offset, length, _ranges(pieces, plain_bytes, name)))
    return Coding(_name(codec, "a codec"), plain_bytes, tuple(chunks))


def _sums(text: Any, count: int) -> tuple[int, ...]:
    fits = isinstance(text, str) and len(text) == 16 * count and _HEX.fullmatch(text) is not None
    _check(fits, f"there are not {count} checksums")
    return tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16))


def _covered(file: PageFile) -> list[tuple[int, int]]:
    """Return the ranges that tensors may lie in: those with a checksum, or their expansion."""
    if file.coding is None:
        return _joined(file.pieces)
    return _joined(piece for chunk in file.coding.chunks for piece in chunk.pieces)


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (start, stop), joined and in order, from offsets and lengths."""
    ranges: list[tuple[int, int]] = []
    for offset, length in sorted(pieces):
        start, stop = offset, offset + length
        if ranges and start <= ranges[-1][1]:
            first, last = ranges.pop()
            start, stop = first, max(last, stop)
        ranges.append((start, stop))
    return ranges


def _is_covered(start: int, stop: int, ranges: list[tuple[int, int]]) -> bool:
    return start == stop or any(first <= start and stop <= last for first, last in ranges)


def _tensor_of(
    entry: Any, files: Mapping[str, PageFile], covered: Mapping[str, list[tuple[int, int]]]
) -> TensorPlace:
    name, offset, dtype, shape, stride = _list(entry, "a tensor", 5)
    _check(isinstance(name, str) and name in files, f"a tensor is in {name!r:.60}")
    _check(isinstance(dtype, str) and dtype in DTYPES, f"a tensor has dtype {dtype!r:.60}")
    sizes = tuple(_count(n, "a dimension") for n in _list(shape, "a shape"))
    steps = tuple(_count(n, "a stride") for n in _list(stride, "strides", len(sizes)))
    _check(len(sizes) <= 64 and all(sizes), f"a tensor has shape {sizes}")
    place = TensorPlace(name, _count(offset, "an offset"), DTYPES[dtype], sizes, steps)
    stop = place.offset + place.nbytes
    _check(
        _is_covered(place.offset, stop, covered[name]),
        f"a tensor is at bytes of {name} that have no checksum",
    )
    _check(place.offset % place.dtype.itemsize == 0, f"a tensor begins at byte {place.offset}")
    return place


def id_of(path: str | os.PathLike[str]) -> str | None:
    """Return the id of the checkpoint that a file is the manifest of; None where it is none."""
    if not is_manifest(path):
        return None
    try:
        return parse_manifest(path).checkpoint_id
    except (ConfigError, StorageError):
        return None
