"""The settings of a process: `mt.init` once, and every model and Trainer after it uses them."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mt_lightning.engine.options import Options
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface import streamed
from mt_lightning.strategy import MegaTrainStrategy

log = logging.getLogger(__name__)


@dataclass
class _Session:
    options: Options | None = None


@dataclass
class _Run:
    strategy: MegaTrainStrategy
    fits: bool


_session = _Session()
_runs: dict[str, _Run] = {}
"""The last run of this process in each directory. It holds the directory's lock, so that no other
process can put a run there that would then be taken for one of ours."""


def init(
    offload_dir: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
    max_vram_gb: float | None = None,
    optimizer_compression: bool | str = False,
    **options: Any,
) -> None:
    """Say once how this process trains, before models are loaded.

    From here on `from_pretrained` of transformers streams checkpoints: weights stay in their file,
    or go to one under `offload_dir` tensor by tensor, and `mt.Trainer` moves them to pages. Called
    again, it replaces the settings for the Trainers that come; those that exist keep theirs.

    Args:
        offload_dir: One directory, or a list with one per drive. None: a fresh one under the
            `output_dir` of each Trainer.
        max_vram_gb: Device budget in GiB; see `MegaTrainStrategy`. On a CPU it says one line and is
            ignored.
        optimizer_compression: How optimizer state is kept; see `MegaTrainStrategy`.
        **options: The other options of `MegaTrainStrategy`, such as `max_ram_gb`.

    Raises:
        ConfigError: An option is unknown or wrong.
    """
    given = {
        "offload_dir": offload_dir,
        "max_vram_gb": max_vram_gb,
        "optimizer_compression": optimizer_compression,
        **options,
    }
    names = [field.name for field in dataclasses.fields(Options)]
    refuse_unknown("mt.init", options, names)
    new = Options(**given)
    if _session.options is not None and _session.options != new:
        log.info("mt.init: later Trainers use the new settings; those that exist keep theirs.")
    _session.options = new
    streamed.enable(new.directories)


def reset() -> None:
    """Forget what `init` said; `from_pretrained` loads as transformers does."""
    _session.options = None
    _runs.clear()
    streamed.disable()


def refuse_unknown(what: str, given: dict[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for names that are not known, with the nearest one that is."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise ConfigError(f"{what} has no option {name!r}; {hint}")


def new_strategy(*, fits: bool, recompute: bool, resumes: bool) -> MegaTrainStrategy:
    """Return a strategy with the settings of the process.

    A run that an earlier Trainer of this process left in the directory gives way: its model keeps
    its weights, which are mapped. One that it has found there and only evaluated stays.

    Args:
        fits: Whether it is for training.
        recompute: Whether units are recomputed in any case.
        resumes: Whether a checkpoint says where to go on, not what is in the directory.
    """
    options = _session.options or Options()
    changes: dict[str, Any] = {}
    if recompute:
        changes["recompute"] = True
    if resumes and options.on_existing == "error":
        changes["on_existing"] = "resume"
    keys = [os.path.realpath(os.path.expanduser(each)) for each in options.directories or ()]
    for run in [_runs[key] for key in keys if key in _runs]:
        engine = run.strategy.engine
        if engine is None:
            continue
        if engine.attached:
            raise ConfigError(
                f"another Trainer of this process is training in {', '.join(keys)}. Let it end, or "
                "give mt.init another offload_dir."
            )
        if run.fits or engine.machine.record is None:
            changes["on_existing"] = "overwrite"
        run.strategy._close()
    fields = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    strategy = MegaTrainStrategy(**{**fields, **changes})
    for key in keys:
        _runs[key] = _Run(strategy, fits)
    return strategy
