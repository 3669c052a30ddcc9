"""A transformers model without weights: it says which tensors are saved, and under which names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mt_lightning.errors import ConfigError
from mt_lightning.export.weights import Weights, bytes_of

# What wrappers put into the names of the modules that they wrap.
_WRAPPED = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_MOST_NAMES = 6


def build_skeleton(config: PreTrainedConfig, architecture: str | None) -> PreTrainedModel:
    """Build a model on meta.

    Args:
        config: Its config.
        architecture: The name of its class in transformers; None: the config's, else the class
            that `AutoModelForCausalLM` chooses.

    Raises:
        ConfigError: There is no such class, or it cannot be built from the config.
    """
    name = architecture or next(iter(config.architectures or ()), None)
    found = getattr(transformers, name, None) if name else None
    try:
        with torch.device("meta"):
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                return found(config)
            if name:
                raise ConfigError(
                    f"the model is a {name}, which this transformers {transformers.__version__} "
                    "does not have. Install the release that has it; a model with code of its own "
                    "cannot be exported this way: give OUT a name that ends in .safetensors."
                )
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"no model can be built from the config ({name or config.model_type}): {error}"
        ) from error


def saved_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the names that transformers saves, each with all names of the same tensor.

    Of tied tensors one is saved: that which the others are declared to be tied to.
    """
    groups: dict[object, list[str]] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    ignored = set(model._keys_to_ignore_on_save or ())
    for name in state_names(model):
        if name not in ignored:
            groups.setdefault(id(tensors.get(name, name)), []).append(name)
    tied = [re.compile(pattern) for pattern in _tied_patterns(model)]
    saved: dict[str, list[str]] = {}
    for names in groups.values():
        main = [name for name in sorted(names) if not any(p.search(name) for p in tied)]
        saved[main[0] if main else sorted(names)[-1]] = names
    return saved


def state_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of parameters and persistent buffers, as `state_dict` has them."""
    for path, each in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, param in each._parameters.items():
            if param is not None:
                yield prefix + name
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield prefix + name


def _tied_patterns(model: nn.Module) -> Iterator[str]:
    for path, each in model.named_modules():
        declared: Any = getattr(each, "_tied_weights_keys", None) or ()
        for key in declared:
            yield f"{path}.{key}" if path else key


@dataclass(frozen=True)
class Match:
    """Which tensors are a model's.

    Attributes:
        prefix: What is before their names.
        names: Name that transformers saves to name in the weights.
        left_out: Names in the weights that are no part of the model.
    """

    prefix: str
    names: dict[str, str]
    left_out: list[str]


def match_names(weights: Weights, model: PreTrainedModel, prefix: str | None = None) -> Match:
    """Find a model's tensors in the weights of what wraps it.

    Args:
        weights: All weights.
        model: The model, on meta.
        prefix: What is before its names; None: found.

    Raises:
        ConfigError: Tensors are missing, or have another shape than the config says.
    """
    facts, aliases = weights.facts(), weights.aliases()
    plain = {_WRAPPED.sub("", name): name for name in (*aliases, *facts)}
    saved = saved_names(model)
    if prefix is None:
        prefix = _find_prefix(plain, saved)
    elif prefix and not prefix.endswith("."):
        prefix += "."
    names: dict[str, str] = {}
    used: set[str] = set()
    for name, group in saved.items():
        found = [plain[prefix + each] for each in (name, *group) if prefix + each in plain]
        if found:
            sources = list(dict.fromkeys(aliases.get(each, each) for each in found))
            names[name] = sources[0]
            used.update(sources)
            _check_tied(weights, sources)
    missing = [name for name in saved if name not in names]
    if missing:
        there = f" under {prefix!r}" if prefix else ""
        raise ConfigError(
            f"{len(missing)} of the {len(saved)} tensors of a {type(model).__name__} are not"
            f"{there} in the weights: {_some(missing)}. The weights have {_some(list(facts))}. "
            "Give the model that was trained with --model, or where its names begin with --prefix."
        )
    _check_shapes(weights, model, names)
    left_out = [name for name in facts if name not in used]
    return Match(prefix, names, left_out)


def _find_prefix(plain: Mapping[str, str], saved: Mapping[str, list[str]]) -> str:
    """Return the prefix under which most of the model's names are there, the shortest of these."""
    last = {name.rpartition(".")[2] for group in saved.values() for name in group}
    counts: dict[str, int] = {}
    wanted = {each: name for name, group in saved.items() for each in group}
    hits: dict[str, set[str]] = {}
    for name in plain:
        if name.rpartition(".")[2] not in last:
            continue
        parts = name.split(".")
        for i in range(len(parts)):
            prefix, rest = "".join(f"{part}." for part in parts[:i]), ".".join(parts[i:])
            if rest in wanted:
                hits.setdefault(prefix, set()).add(wanted[rest])
    counts = {prefix: len(found) for prefix, found in hits.items()}
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")


def _check_tied(weights: Weights, sources: list[str]) -> None:
    """Raise ConfigError when what a config ties holds different values."""
    first, *others = sources
    for other in others:
        if weights.facts()[first] != weights.facts()[other] or not _same(weights, first, other):
            raise ConfigError(
                f"the config ties {first} and {other}, but they hold different values. Export "
                "with --model and a config that has tie_word_embeddings=false."
            )


def _same(weights: Weights, first: str, other: str) -> bool:
    held = weights.tensor(first)
    # As bytes: NaN equals itself there.
    return bytes_of(held) == bytes_of(weights.tensor(other))


def _check_shapes(weights: Weights, model: PreTrainedModel, names: Mapping[str, str]) -> None:
    facts = weights.facts()
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    for name, source in names.items():
        expected = tuple(tensors[name].shape) if name in tensors else facts[source].shape
        if facts[source].shape != expected:
            raise ConfigError(
                f"{source} has shape {facts[source].shape}, and the config of the "
                f"{type(model).__name__} asks for {expected}. Give the config of the model that "
                "was trained with --model."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
