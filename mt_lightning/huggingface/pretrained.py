"""Save a transformers model from weights that are read piece by piece, for `from_pretrained`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.export.shards import DEFAULT_SHARD_SIZE, Saved, save_weights, size_bytes
from mt_lightning.export.weights import RenamedWeights, TensorWeights, Weights
from mt_lightning.huggingface.original_format import in_original_format
from mt_lightning.huggingface.skeleton import match_names

_METADATA = {"format": "pt"}


def save_named(
    weights: Weights,
    model: PreTrainedModel,
    directory: Path,
    *,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Saved:
    """Write config, generation config and weights of a model.

    Args:
        weights: The weights, under the names that transformers saves.
        model: The model, or one without weights that is built alike.
        directory: An existing directory.
        max_shard_size: The most bytes of tensors in one file; see `size_bytes`.
        advance: Called with the number of bytes of each piece that was written.

    Raises:
        ConfigError: A setting or a config cannot be saved.
        StorageError: Something cannot be read or written.
        CorruptPageError: What was read is not what was written once.
    """
    shard_bytes = size_bytes(max_shard_size)
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config") and not is_quantized(model):
        del config.quantization_config  # the checkpoint was quantised; these weights are not
    dtypes = [f.dtype for f in weights.facts().values() if f.dtype.is_floating_point]
    if dtypes:
        config.dtype = str(dtypes[0]).removeprefix("torch.")
    original = in_original_format(weights, model)
    saved = save_weights(
        directory, original, shard_bytes=shard_bytes, metadata=_METADATA, advance=advance
    )
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    try:
        config.save_pretrained(directory)
        if model.can_generate() and generation is not None:
            generation.save_pretrained(directory)
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot write the config: {error.strerror}", str(directory)
        ) from error
    except ValueError as error:
        raise ConfigError(f"transformers refuses to save the config: {error}") from error
    return saved


def save_model(
    model: PreTrainedModel, directory: Path, *, max_shard_size: int | str = DEFAULT_SHARD_SIZE
) -> Saved:
    """Save a live model, paged or not, without a copy of its weights in RAM.

    Args:
        model: The model. While pages hold it, its weights are read from their files.
        directory: Where to; made if it is not there. Weights of an earlier save are replaced.
        max_shard_size: The most bytes of tensors in one file; see `size_bytes`.

    Raises:
        ConfigError: Only transformers itself can save such a model, or a setting is wrong.
        StorageError: Something cannot be read or written.
    """
    size_bytes(max_shard_size)
    _check_savable(model)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a directory.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot make the directory: {error.strerror}", str(directory)
        ) from error
    weights = TensorWeights(model.state_dict())
    names = match_names(weights, model, prefix="").names
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        config: Any = model.config  # annotated as a dict there
        custom_object_save(model, directory, config=config)
    return save_named(
        RenamedWeights(weights, names), model, directory, max_shard_size=max_shard_size
    )


def is_quantized(model: nn.Module) -> bool:
    """Return whether weights are kept in a form of a quantizer's own.

    A model that was read from a GGUF file has a quantizer too, and plain weights.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return False
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return not all(type(p.data) is torch.Tensor and p.dtype in kinds for p in model.parameters())


def forget_quantizer(model: nn.Module) -> None:
    """Let a model with plain weights be an ordinary one, which can be saved as such."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not is_quantized(model):
        quantizer.remove_quantization_config(model)


def _check_savable(model: PreTrainedModel) -> None:
    way_out = "Call save_pretrained of the model itself, module.model.save_pretrained(...)."
    if is_quantized(model):
        raise ConfigError(f"the model is quantized, which only transformers can save. {way_out}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(f"the model holds adapters, which only transformers saves. {way_out}")
