"""Save weights in a directory: one file, or shards with an index, as transformers lays them out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.export.safetensors_file import check_dtypes, write_safetensors
from mt_lightning.export.weights import Facts, Weights
from mt_lightning.tiers.filesystem import free_bytes, sync_directory

DEFAULT_SHARD_SIZE = "5GB"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PART = ".part"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Saved:
    """What was written.

    Attributes:
        files: Names of the weight files.
        num_tensors: Tensors in them.
        nbytes: Bytes of these tensors.
    """

    files: tuple[str, ...]
    num_tensors: int
    nbytes: int


def size_bytes(size: int | str) -> int:
    """Return a size as a number of bytes.

    Args:
        size: A number of bytes, or text such as "5GB" (5 * 1000^3) or "5GiB" (5 * 1024^3).

    Raises:
        ConfigError: It is no such size, or not positive.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    nbytes = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if found is not None:
        unit = found[2].upper()
        base = 1024 if unit.endswith("I") else 1000
        known = unit.rstrip("I") in _POWERS and unit != "I"
        nbytes = math.floor(float(found[1]) * base ** _POWERS[unit.rstrip("I")]) if known else 0
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise ConfigError(
            f"max_shard_size={size!r}: give a number of bytes, or a size such as '5GB' or '500MiB'."
        )
    return nbytes


def split(facts: Mapping[str, Facts], shard_bytes: int) -> list[list[str]]:
    """Sort tensors into shards, in order; one that is larger than a shard has one of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, each in facts.items():
        if each.nbytes > shard_bytes:
            shards.insert(len(shards) - 1, [name])
            continue
        if held + each.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += each.nbytes
    return [shard for shard in shards if shard] or [[]]


def save_weights(
    directory: Path,
    weights: Weights,
    *,
    shard_bytes: int,
    metadata: Mapping[str, str],
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Saved:
    """Write weights into a directory; weights that an earlier save left there are replaced.

    Files get their names when all of them are whole; until then what was there stays.

    Args:
        directory: An existing directory.
        weights: What to save.
        shard_bytes: The most bytes of tensors in one file.
        metadata: More for the header of each file.
        advance: Called with the number of bytes of each piece that was written.

    Raises:
        ConfigError: A dtype has no name in safetensors.
        StorageError: There is too little space, or a file cannot be read or written.
        CorruptPageError: What was read is not what was written once.
    """
    check_dtypes(weights)
    facts = weights.facts()
    total_bytes = sum(each.nbytes for each in facts.values())
    check_room(directory, total_bytes)
    shards = split(facts, shard_bytes)
    if len(shards) == 1:
        names = [WEIGHTS_NAME]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    parts = [directory / f"{name}{_PART}" for name in names]
    try:
        for part, shard in zip(parts, shards, strict=True):
            write_safetensors(part, weights, shard, metadata, advance)
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    try:
        _install(directory, names, parts, _index(names, shards, facts, total_bytes))
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot finish the save: {error.strerror}", str(directory)
        ) from error
    return Saved(tuple(names), len(facts), total_bytes)


def check_room(directory: Path, nbytes: int) -> None:
    """Raise StorageError when bytes do not fit."""
    free = free_bytes(directory)
    if nbytes > free:
        raise StorageError(
            None,
            f"the weights take {nbytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free. "
            "Free some space, or write to another drive",
            str(directory),
        )


def _index(
    names: list[str], shards: list[list[str]], facts: Mapping[str, Facts], total_bytes: int
) -> str | None:
    if len(names) == 1:
        return None
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total_parameters = sum(each.numel for each in facts.values())
    content = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_bytes},
        "weight_map": weight_map,
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _install(directory: Path, names: list[str], parts: list[Path], index: str | None) -> None:
    """Give whole files their names, then remove what an earlier save left."""
    index_path = directory / INDEX_NAME
    index_path.unlink(missing_ok=True)  # without it nobody takes old and new shards for one model
    for name, part in zip(names, parts, strict=True):
        part.replace(directory / name)
    if index is not None:
        fresh = directory / f"{INDEX_NAME}{_PART}"
        fresh.write_text(index)
        fresh.replace(index_path)
    for file in directory.iterdir():
        old = _SHARD.fullmatch(file.name) or file.name == WEIGHTS_NAME
        if old and file.name not in names:
            file.unlink()
    sync_directory(directory)
