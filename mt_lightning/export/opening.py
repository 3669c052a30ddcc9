"""Open what an export reads: a checkpoint, or the directories of a committed run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_lightning.engine.committed import open_committed
from mt_lightning.errors import ConfigError
from mt_lightning.export.masters import MasterWeights, rests_in
from mt_lightning.export.run_weights import RunWeights
from mt_lightning.export.weights import TensorWeights, Weights
from mt_lightning.plugins.checkpoint_io import PagedCheckpointIO
from mt_lightning.resume.description import MODELS_KEY
from mt_lightning.tiers.shared_lock import shared


@dataclass(frozen=True)
class Opened:
    """Weights, and what is known of the module that they are of.

    Attributes:
        weights: The weights.
        step: Optimizer steps that are in them, None where that is not known.
        models: What was written down of the transformers models inside; see `describe_models`.
        hyper_parameters: What the module was made with.
    """

    weights: Weights
    step: int | None
    models: list[dict[str, Any]]
    hyper_parameters: dict[str, Any]


@contextmanager
def opened(sources: Sequence[Path], *, masters: bool = False) -> Iterator[Opened]:
    """Open one checkpoint file, or all directories of one run; no run may change them meanwhile.

    Args:
        sources: The file or the directories.
        masters: Whether weights that are halves of fp32 masters are opened as these.

    Raises:
        ConfigError: They are neither, or a run uses them.
        CorruptPageError: What is there is damaged.
        StorageError: It cannot be read.
    """
    for source in sources:
        if not source.exists():
            raise ConfigError(f"{source} does not exist; give a checkpoint or a run's directory.")
    if masters and any(source.is_dir() for source in sources):
        raise ConfigError(
            "masters are read from a checkpoint, not from the pages of a run: give one that the "
            "run saved, or resume it and call mt.save_masters(trainer, path)."
        )
    if all(source.is_dir() for source in sources):
        with shared(sources), closing(RunWeights(run := open_committed(sources))) as weights:
            known = weights.description
            yield _opened(weights, run.record.step, known.get(MODELS_KEY), known)
        return
    if len(sources) > 1:
        raise ConfigError(
            "give one checkpoint file, or all directories of one run: several files, or files and "
            "directories together, are not one model."
        )
    checkpoint = PagedCheckpointIO().load_checkpoint(sources[0])
    state_dict = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise ConfigError(f"{sources[0]} holds no state_dict: it is no checkpoint of Lightning.")
    weights: Weights = TensorWeights(state_dict, private=True)
    if masters:
        weights = MasterWeights(weights, rests_in(checkpoint))
    yield _opened(weights, checkpoint.get("global_step"), checkpoint.get(MODELS_KEY), checkpoint)


def _opened(weights: Weights, step: object, models: object, known: Mapping[str, Any]) -> Opened:
    hyper_parameters = known.get("hyper_parameters")
    return Opened(
        weights,
        step if isinstance(step, int) else None,
        [each for each in models if isinstance(each, dict)] if isinstance(models, list) else [],
        dict(hyper_parameters) if isinstance(hyper_parameters, Mapping) else {},
    )
