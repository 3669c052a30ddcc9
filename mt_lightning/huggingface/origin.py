"""Where config and tokenizer of an exported model come from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.loading import SMOLLM2_NAMES, load_tokenizer, smollm2_directory

_NAMES = ("model", "model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id")
"""Hyper-parameters in which modules keep the name or path of their model."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Origin:
    """What weights alone do not say.

    Attributes:
        config: Config of the model.
        architecture: Name of its class, None where only the config says.
        generation_config: How it generates, None for what follows from the config.
        names: Where its tokenizer may be found, best first.
        prefix: What is before the names of its tensors, None where that is to be found.
    """

    config: PreTrainedConfig
    architecture: str | None
    generation_config: GenerationConfig | None
    names: tuple[str, ...]
    prefix: str | None


def find_origin(
    model: str | None,
    prefix: str | None,
    models: Sequence[Mapping[str, Any]],
    hyper_parameters: Mapping[str, Any],
) -> Origin:
    """Find config and tokenizer of a model.

    Args:
        model: What the user named: a folder, or a name that transformers knows.
        prefix: Where the model is in its module, as the user says.
        models: What was written down of the models in the module.
        hyper_parameters: Those of the module.

    Raises:
        ConfigError: Nothing says what the model is, or several do.
    """
    if model is not None:
        return _from_name(model, prefix)
    named = [hyper_parameters[n] for n in _NAMES if isinstance(hyper_parameters.get(n), str)]
    wanted = None if prefix is None else prefix.removesuffix(".")
    known = [each for each in models if each.get("config") and wanted in (None, each.get("path"))]
    if len(known) > 1:
        paths = ", ".join(str(each.get("path")) for each in known)
        raise ConfigError(f"the module holds several models ({paths}); choose one with --prefix.")
    if known:
        return _from_description(known[0], named)
    for name in named:
        try:
            return _from_name(name, prefix)
        except ConfigError as error:
            raise ConfigError(
                f"the module was made with {name!r}, which cannot be read: {error} If it lies "
                "elsewhere now, say so with --model NAME_OR_DIR."
            ) from error
    raise ConfigError(
        "nothing says which model of transformers these weights are of. Give the model that was "
        "trained with --model NAME_OR_DIR (its config and tokenizer are used, not its weights), or "
        "an OUT that ends in .safetensors for the plain state dict."
    )


def _from_name(name: str, prefix: str | None) -> Origin:
    folder = _folder(name)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise ConfigError(f"no config of a model at {name!r}: {reason[0]}") from error
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError):  # few models have one, and the config says the same
        generation = None
    return Origin(config, None, generation, (name,), prefix)


def _from_description(known: Mapping[str, Any], named: Sequence[str]) -> Origin:
    settings = dict(known["config"])
    kind = str(settings.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"the model is a {kind!r}, which this transformers does not know. Give a folder with "
            "its config with --model, or an OUT that ends in .safetensors."
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(settings)
        generation = known.get("generation_config")
        generation = GenerationConfig.from_dict(generation) if generation else None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"the config that was written down with the weights cannot be read: {error}. Give the "
            "model that was trained with --model."
        ) from error
    names = [str(known.get("name_or_path") or ""), *named]
    path = str(known.get("path") or "")
    architecture = known.get("architecture")
    return Origin(
        config,
        str(architecture) if architecture else None,
        generation,
        tuple(name for name in names if name),
        f"{path}." if path else "",
    )


def save_tokenizer(tokenizer: str | None, names: Sequence[str], directory: Path) -> str | None:
    """Put the files of a tokenizer into a directory.

    Args:
        tokenizer: What the user named, as for `load_tokenizer`.
        names: Where it may be found otherwise.
        directory: Where its files go.

    Returns:
        Where it was found, None where it was not.

    Raises:
        ConfigError: The one that the user named is not there.
    """
    if tokenizer is not None:
        if not _copy_tokenizer(tokenizer, directory):
            load_tokenizer(tokenizer).save_pretrained(directory)
        return tokenizer
    for name in names:
        if _copy_tokenizer(name, directory):
            return name
        if not os.path.isdir(name):
            try:
                load_tokenizer(name).save_pretrained(directory)
            except ConfigError:  # a guess: whoever reads the report can name another
                continue
            return name
    return None


def _copy_tokenizer(name: str, directory: Path) -> bool:
    """Copy a folder's tokenizer files as they are; False where there are none."""
    folder = _folder(name)
    if not os.path.isdir(folder):
        return False
    found = [file for file in _TOKENIZER_FILES if (Path(folder) / file).is_file()]
    for file in found:
        shutil.copyfile(Path(folder) / file, directory / file)
    return bool(found)


def _folder(name: str) -> str:
    return str(smollm2_directory()) if name in SMOLLM2_NAMES else name
