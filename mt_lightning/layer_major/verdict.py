"""Whether batches run unit by unit, why, and for which model that was found."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import xxhash

from mt_lightning.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the first window has shown.

    Attributes:
        layer_major: Whether batches run unit by unit from now on.
        reason: Why, as a sentence for people.
        model: `model_key` of the model that it was found for.
    """

    layer_major: bool
    reason: str
    model: str | None

    def state(self) -> dict[str, Any]:
        """Return it as plain values, for a run that goes on."""
        return asdict(self)


def model_key(module: pl.LightningModule, engine: Engine) -> str | None:
    """Return what tells a model from one that might give another verdict.

    That is: its modules with what they print of themselves, the pages, the source files of all
    classes of its modules, the precision, and the versions of torch and Lightning. A file that none
    of the classes comes from is not seen.

    Returns:
        A digest, None where a class has no source file: then nobody can say.
    """
    digest = xxhash.xxh3_128()
    strategy = module.trainer.strategy
    try:
        shown = repr(module)
    except Exception:  # by code of a user
        return None
    for part in (
        shown,
        engine.live.run.build.table.fingerprint,
        str(strategy.precision_plugin.precision),
        str(engine.options.units),
        torch.__version__,
        lightning.__version__,
    ):
        digest.update(part.encode())
    files: set[str] = set()
    for kind in {base for each in module.modules() for base in type(each).__mro__}:
        if kind.__module__ in ("builtins", "abc", "typing"):
            continue
        try:
            files.add(inspect.getfile(kind))
        except (TypeError, OSError):
            return None
    for name in sorted(files):
        try:
            with open(name, "rb") as file:
                digest.update(file.read())
        except OSError:
            return None
    return digest.hexdigest()
