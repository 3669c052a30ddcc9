"""Models that PEFT has put adapters into."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from mt_lightning.errors import StorageError


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT's, which saves adapters alone."""
    peft: Any = sys.modules.get("peft")  # who has such a model has imported it
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that was adapted; a model without adapters is its own."""
    found: Any = model
    return found.get_base_model() if is_adapted(model) else model


def save_adapters(model: nn.Module, directory: Path) -> None:
    """Write the adapters for `PeftModel.from_pretrained`, at any time, in a fit too.

    Raises:
        StorageError: They cannot be written.
    """
    adapted: Any = model
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Embeddings belong to adapters only if they are trained; PEFT would ask the hub else.
        adapted.save_pretrained(str(directory), save_embedding_layers=_saves_embeddings(model))
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot write the adapters: {error.strerror}", str(directory)
        ) from error


def _saves_embeddings(model: nn.Module) -> bool:
    base: Any = base_of(model)
    layers = [base.get_input_embeddings()] if hasattr(base, "get_input_embeddings") else []
    layers = [layer for layer in layers if layer is not None]
    return any(p.requires_grad for layer in layers for p in layer.parameters())
