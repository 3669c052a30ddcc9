"""What a module is, as JSON that is kept beside its pages: for an export without its code."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import nn

DESCRIPTION_KEY = "description"
"""The key in the state of a run with the name of the file."""

MODELS_KEY = "transformers"
"""The key, here and in a checkpoint, of what `describe_models` returns."""

log = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, str)


def describe(module: pl.LightningModule) -> bytes:
    """Return what an export asks of a module besides its weights."""
    return json.dumps(
        {
            "module": f"{type(module).__module__}.{type(module).__qualname__}",
            "hyper_parameters": {k: v for k, v in module.hparams.items() if _is_plain(v)},
            "persistent_buffers": list(_persistent_buffers(module)),
            "tied": _tied(module),
            MODELS_KEY: describe_models(module),
        },
        sort_keys=True,
    ).encode()


def describe_models(module: nn.Module) -> list[dict[str, Any]]:
    """Return class and config of each transformers model in a module, outermost ones only."""
    # Who has such a model has imported transformers; who has none need not wait for it.
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[dict[str, Any]] = []
    paths: list[str] = []
    for path, each in module.named_modules():
        inside = any(not outer or path == outer or path.startswith(f"{outer}.") for outer in paths)
        if not inside and isinstance(each, transformers.PreTrainedModel):
            paths.append(path)
            found.append(_describe_model(path, each))
    return found


def _describe_model(path: str, model: Any) -> dict[str, Any]:
    generation = getattr(model, "generation_config", None)
    return {
        "path": path,
        "architecture": type(model).__name__,
        "config": _settings(model.config, use_diff=False),
        "generation_config": _settings(generation, use_diff=True) if generation else None,
        "name_or_path": str(getattr(model.config, "name_or_path", "") or ""),
    }


def _settings(config: Any, *, use_diff: bool) -> dict[str, Any] | None:
    """Return a config of transformers as JSON data, None for one that has other things in it."""
    try:
        return json.loads(config.to_json_string(use_diff=use_diff))
    except (TypeError, ValueError) as error:
        # No run fails for want of an export; the export then asks for --model.
        log.warning("%s cannot be written down: %s", type(config).__name__, error)
        return None


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _persistent_buffers(module: nn.Module) -> Iterator[str]:
    for path, each in module.named_modules():
        for name, buffer in each.named_buffers(recurse=False):
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name


def _tied(module: nn.Module) -> dict[str, str]:
    """Map each further name of a parameter to its first one."""
    first: dict[int, str] = {}
    tied = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            tied[name] = first[id(param)]
    return tied
