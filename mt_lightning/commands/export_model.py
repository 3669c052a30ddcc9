"""`megatrain export IN... OUT`: the weights of a run or checkpoint, for `from_pretrained`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.export.opening import Opened, opened
from mt_lightning.export.safetensors_file import check_dtypes, write_safetensors
from mt_lightning.export.shards import Saved, check_room, size_bytes
from mt_lightning.export.weights import RenamedWeights

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class ModelExport:
    """What an export wrote.

    Attributes:
        saved: The weight files.
        step: Optimizer steps that are in the weights, None where that is not known.
        architecture: Class of the model, None for a plain state dict.
        tokenizer: Where the tokenizer was found, None without one.
        left_out: Names of tensors that are no part of the model.
    """

    saved: Saved
    step: int | None
    architecture: str | None = None
    tokenizer: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What the user can say about a model.

    Attributes:
        model: Folder or name whose config, generation config and tokenizer are used.
        tokenizer: Folder or name of the tokenizer, where it is another.
        prefix: What is before the names of the model's tensors.
        max_shard_size: The most bytes of tensors in one file; None: 5 GB.
        masters: Whether fp32 masters are written in place of their bfloat16 weights.
    """

    model: str | None = None
    tokenizer: str | None = None
    prefix: str | None = None
    max_shard_size: str | None = None
    masters: bool = False


def export_model(
    sources: Sequence[Path],
    target: Path,
    options: ModelOptions,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
) -> ModelExport:
    """Write the weights of a checkpoint or of a committed run as safetensors.

    Args:
        sources: A checkpoint file, or the directories of one run.
        target: A directory for `from_pretrained`, or a file `*.safetensors` for the plain state
            dict; it must not exist.
        options: What the weights do not say.
        begin: Called once with the number of bytes of all tensors.
        advance: Called with the number of bytes of each piece that was written.

    Raises:
        ConfigError: Something is missing, contradicts the weights, or is in use.
        CorruptPageError: What is read is damaged.
        StorageError: Something cannot be read or written; nothing is left behind.
    """
    plain = target.suffix == SUFFIX
    if plain and options != ModelOptions(masters=options.masters):
        raise ConfigError(
            f"{target} is one file with the plain state dict: --model, --tokenizer, --prefix and "
            "--max-shard-size are for an OUT that is a directory."
        )
    if options.max_shard_size is not None:
        size_bytes(options.max_shard_size)
    if target.exists() and (plain or not _is_empty(target)):
        raise ConfigError(f"{target} exists; give another name, or delete it first.")
    with opened(sources, masters=options.masters) as source:
        begin(sum(facts.nbytes for facts in source.weights.facts().values()))
        if plain:
            return _export_plain(source, target, advance)
        return _export_pretrained(source, target, options, advance)


def _export_plain(source: Opened, target: Path, advance: Callable[[int], None]) -> ModelExport:
    weights = source.weights
    facts = weights.facts()
    check_dtypes(weights)
    nbytes = sum(each.nbytes for each in facts.values())
    part = target.with_name(f"{target.name}.part")
    with as_storage_error("export", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        check_room(target.parent, nbytes)
        # Further names of tied tensors are noted as safetensors' own save_model notes them.
        metadata = {"format": "pt", **weights.aliases()}
        write_safetensors(part, weights, list(facts), metadata, advance)
        part.replace(target)
    return ModelExport(Saved((target.name,), len(facts), nbytes), source.step)


def _export_pretrained(
    source: Opened, target: Path, options: ModelOptions, advance: Callable[[int], None]
) -> ModelExport:
    # transformers takes a second to import, which the other commands need not wait for.
    from mt_lightning.export.shards import DEFAULT_SHARD_SIZE
    from mt_lightning.huggingface.origin import find_origin, save_tokenizer
    from mt_lightning.huggingface.pretrained import save_named
    from mt_lightning.huggingface.skeleton import build_skeleton, match_names

    origin = find_origin(options.model, options.prefix, source.models, source.hyper_parameters)
    model = build_skeleton(origin.config, origin.architecture)
    if origin.generation_config is not None:
        model.generation_config = origin.generation_config
    match = match_names(source.weights, model, origin.prefix)
    with _new_directory(target) as directory:
        saved = save_named(
            RenamedWeights(source.weights, match.names),
            model,
            directory,
            max_shard_size=options.max_shard_size or DEFAULT_SHARD_SIZE,
            advance=advance,
        )
        found = save_tokenizer(options.tokenizer, origin.names, directory)
    left_out = tuple(match.left_out)
    return ModelExport(saved, source.step, type(model).__name__, found, left_out)


@contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """Give a directory beside `target` that gets its name when everything is in it."""
    with as_storage_error("export", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part-{os.getpid()}")
        part.mkdir()
    try:
        yield part
        with as_storage_error("export", target):
            part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def as_storage_error(what: str, target: Path) -> Iterator[None]:
    """Name the file in an error of the file system that comes while `what` is written to it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            error.errno, f"cannot write the {what}: {error.strerror}", str(target)
        ) from error


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
