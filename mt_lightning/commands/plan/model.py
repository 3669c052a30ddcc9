"""The model of `megatrain plan`: a size, a Hugging Face config, or a Hydra model; on meta."""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, masking_utils

from mt_lightning.commands.plan.sizes import SHAPES, size_config
from mt_lightning.commands.settings import CONFIG_NAME, VERSION_BASE, settings_directory
from mt_lightning.engine.options import Options
from mt_lightning.errors import ConfigError, MegaTrainError
from mt_lightning.huggingface.skeleton import build_skeleton
from mt_lightning.planning.planner import Worker
from mt_lightning.planning.tiers import LOSS_CHUNK_BYTES, Model
from mt_lightning.planning.timed import timed
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import ModelWork, count_work, estimate_work

_MOST_LAYERS = 4096


def find_model(name: str, options: Options | None = None) -> Model:
    """Build a model without weights.

    Args:
        name: A size ("100B"), a folder or file of a Hugging Face config, the name of a model in the
            cache of the Hugging Face hub, or one of the models of `conf/model`.
        options: What of a run's options says what the units are; None: the defaults.

    Raises:
        ConfigError: There is no such model, or it cannot be built.
    """
    config = size_config(name)
    if config is None:
        config = _hub_config(name) if Path(name).exists() or "/" in name else None
    root = _hydra_model(name) if config is None else _from_config(config)
    return Model.of(name, root, options)


def worker_for(model: Model, *, on_host: bool = False, times: bool = False) -> Worker:
    """Return what counts the work of a model's micro-batches; each kind is counted once.

    Args:
        model: The model.
        on_host: Whether the host computes, which takes smaller chunks of the loss.
        times: Whether a unit of each kind is run in memory, for the time it takes.
    """
    known: dict[tuple[int, int, str], ModelWork] = {}

    def work(training: Training) -> ModelWork:
        key = (training.batch_size, training.sequence_length, training.precision)
        if key not in known:
            counted = _work(model, training, LOSS_CHUNK_BYTES[on_host])
            known[key] = timed(model, counted, training) if times else counted
        return known[key]

    return work


def _work(model: Model, training: Training, chunk_bytes: int) -> ModelWork:
    language = _language_model(model.root)
    if language is None:
        reason = "it is no language model of transformers: what its batches are is not known"
        return estimate_work(model.units, training.tokens, reason)

    def run(root: nn.Module) -> Any:
        ids = torch.zeros(training.batch_size, training.sequence_length, dtype=torch.long)
        return language(input_ids=ids, labels=ids, use_cache=False)

    try:
        with _whole_sequences(), _quiet():
            return count_work(
                model.root,
                model.units,
                run,
                autocast=training.precision.endswith("-mixed"),
                halves=training.keeps_masters,
                head=language.get_output_embeddings(),
                chunk_bytes=chunk_bytes,
            )
    except Exception as error:  # models are of many kinds, and so is what they raise
        said = str(error).partition("\n")[0][:120]
        reason = f"it does not run without memory ({type(error).__name__}: {said})"
        return estimate_work(model.units, training.tokens, reason)


@contextlib.contextmanager
def _whole_sequences() -> Iterator[None]:
    """Let transformers know what it cannot see without values: no row holds several sequences.

    Else it makes a mask as long as the sequence squared, which a run does without.
    """
    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging what is caught and said in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _language_model(root: nn.Module) -> PreTrainedModel | None:
    found = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
    return next((module for module in found if module.get_output_embeddings() is not None), None)


def _hub_config(name: str) -> PreTrainedConfig:
    path = Path(name)
    missing = path.is_dir() and not (path / "config.json").is_file()
    if missing or (path.is_absolute() and not path.exists()):
        what = "there is no file config.json in it" if missing else "there is no such folder"
        raise ConfigError(f"model={name!r}: {what}. Give a size such as 100B, or a folder with it.")
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each model checks its config in its own way
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise ConfigError(
            f"model={name!r}: no Hugging Face config can be read there: {said}. Give a size such "
            "as 100B, or a folder that holds config.json."
        ) from error


def _from_config(config: PreTrainedConfig) -> nn.Module:
    text = config.get_text_config()
    # Each config maps that name to its own; one with an encoder may have layers there only.
    layers = getattr(text, "num_hidden_layers", None) or getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < 1:
        raise ConfigError(
            f"the config of this {config.model_type or 'model'} has no layers "
            f"(num_hidden_layers is {layers!r}). Give the config of a causal language model."
        )
    if layers > _MOST_LAYERS:
        raise ConfigError(
            f"the config of this {config.model_type or 'model'} has {layers:,} layers: at most "
            f"{_MOST_LAYERS:,} can be planned. Give a smaller num_hidden_layers."
        )
    try:
        root = build_skeleton(config, None)
    except MegaTrainError:
        raise
    except Exception as error:  # so is what building one raises
        raise ConfigError(
            f"no model can be built from this config: {error!r}. Give the config of a causal "
            "language model that transformers builds."
        ) from error
    return _countable(root)


def _countable(root: nn.Module) -> nn.Module:
    """Let experts gather their weights: what the usual loop does depends on values."""
    for module in root.modules():
        if isinstance(module, PreTrainedModel):
            try:
                module.set_experts_implementation("batched_mm")
            except (ValueError, AttributeError, TypeError):
                break  # it has none, or one way only
            break
    return root


def _hydra_model(name: str) -> nn.Module:
    folder = settings_directory()
    names = sorted(path.stem for path in (folder / "model").glob("*.yaml"))
    if name not in names:
        near = difflib.get_close_matches(name, [*names, *SHAPES], n=1, cutoff=0.7)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"model={name!r} is not known.{meant} Sizes end in M, B or T. Give a size such as 100B "
            "or 30B-A3B, a folder with a Hugging Face config.json, or one of "
            f"{', '.join(names)}."
        )
    with initialize_config_dir(str(folder), version_base=VERSION_BASE):
        settings = compose(CONFIG_NAME, overrides=[f"model={name}"])
    settings.tokenizer = name  # whatever it is, it is not needed
    return root_of(settings, name)


def root_of(settings: DictConfig, name: str) -> nn.Module:
    """Build the model of composed settings without weights.

    Args:
        settings: Those of `megatrain train`.
        name: What the model is called in errors.

    Raises:
        ConfigError: It is not named, or cannot be built.
    """
    missing = OmegaConf.is_missing(settings.model, "model")
    inner = None if missing else settings.model.model
    if inner is None or isinstance(inner, str):
        if inner is None:
            raise ConfigError(
                f"model={name!r} needs the name of a model: give the folder of its config.json in "
                "its place, or a size such as 135M."
            )
        return _from_config(_hub_config(inner))
    with torch.device("meta"):
        root = instantiate(inner, _convert_="all")
    if not isinstance(root, nn.Module):
        raise ConfigError(f"model={name!r} makes a {type(root).__name__}, not a module.")
    return _countable(root)
