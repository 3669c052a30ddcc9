"""fp32 masters of a run with precision="bf16-true", joined and written piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from mt_lightning.errors import ConfigError
from mt_lightning.export.safetensors_file import check_dtypes, write_safetensors
from mt_lightning.export.shards import check_room
from mt_lightning.export.weights import Facts, TensorWeights, Weights, bytes_of
from mt_lightning.optim.masters import REST_DTYPE, join
from mt_lightning.pages.state import MASTER_REST
from mt_lightning.plugins.masters import MASTER_NAMES
from mt_lightning.strategy import MegaTrainStrategy

_PIECE_NUMEL = 1 << 20


class MasterWeights(Weights):
    """Weights with those that have a rest as float32, the others as they are.

    Args:
        inner: All weights; those with a rest are bfloat16.
        rests: By name, what the masters have beside the weights: int16, of their shape.
    """

    def __init__(self, inner: Weights, rests: Mapping[str, torch.Tensor]) -> None:
        self._inner = inner
        facts = inner.facts()
        self._rests = {name: rest for name, rest in rests.items() if name in facts}
        for name, rest in self._rests.items():
            found = facts[name]
            if (found.dtype, found.shape) != (torch.bfloat16, tuple(rest.shape)):
                raise ConfigError(
                    f"{name} is {found.dtype} {found.shape}, and its master's lower half is of a "
                    f"bfloat16 weight of shape {tuple(rest.shape)}: they are not of one run."
                )

    @override
    def facts(self) -> Mapping[str, Facts]:
        """See `Weights.facts`."""
        return {
            name: Facts(torch.float32, facts.shape) if name in self._rests else facts
            for name, facts in self._inner.facts().items()
        }

    @override
    def aliases(self) -> Mapping[str, str]:
        """See `Weights.aliases`."""
        return self._inner.aliases()

    @override
    def pieces(self, name: str) -> Iterator[memoryview]:
        """See `Weights.pieces`."""
        if name not in self._rests:
            yield from self._inner.pieces(name)
            return
        weight, rest = self._inner.tensor(name), self._rests[name]
        if not (weight.is_contiguous() and rest.is_contiguous()):
            yield bytes_of(self.tensor(name))
            return
        weight, rest = weight.view(-1), rest.view(-1)
        for start in range(0, weight.numel(), _PIECE_NUMEL):
            stop = min(start + _PIECE_NUMEL, weight.numel())
            yield bytes_of(join(weight[start:stop], rest[start:stop], torch.empty(stop - start)))

    @override
    def tensor(self, name: str) -> torch.Tensor:
        """See `Weights.tensor`."""
        weight = self._inner.tensor(name)
        if name not in self._rests:
            return weight
        return join(weight, self._rests[name], torch.empty(weight.shape))


def save_masters(trainer: pl.Trainer, path: str | os.PathLike[str]) -> None:
    """Write the fp32 masters of a run with `precision="bf16-true"`, in or after a fit.

    Everything else of the state dict is written as it is. One piece is in RAM at a time.

    Args:
        trainer: The trainer, with `strategy="megatrain"`.
        path: The safetensors file; one that exists is replaced when the new one is whole.

    Raises:
        ConfigError: The run keeps no masters.
        StorageError: The file cannot be written.
    """
    strategy = trainer.strategy
    engine = strategy.engine if isinstance(strategy, MegaTrainStrategy) else None
    if engine is None or not engine.masters:
        raise ConfigError(
            "save_masters(trainer) needs a trainer that has run with strategy='megatrain' and "
            f"precision='bf16-true'; this one has {type(strategy).__name__} and "
            f"{trainer.precision!r}, whose state dict holds all there is."
        )
    rests = engine.master_rests()
    weights = MasterWeights(TensorWeights(engine.root.state_dict()), rests)
    check_dtypes(weights)
    facts, target = weights.facts(), Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    check_room(target.parent, sum(each.nbytes for each in facts.values()))
    part = target.with_name(f"{target.name}.part")
    metadata = {"format": "pt", **weights.aliases()}
    write_safetensors(part, weights, list(facts), metadata, lambda nbytes: None)
    part.replace(target)


def rests_in(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what masters have beside the weights of a checkpoint, by name.

    Raises:
        ConfigError: It holds none.
    """
    names: Sequence[Sequence[str]] = checkpoint.get(MASTER_NAMES, ())
    found: dict[str, torch.Tensor] = {}
    for of_optimizer, state_dict in zip(names, checkpoint.get("optimizer_states", ()), strict=True):
        for position, name in enumerate(of_optimizer):
            rest = state_dict["state"].get(position, {}).get(MASTER_REST)
            if isinstance(rest, torch.Tensor) and rest.dtype == REST_DTYPE:
                found[name] = rest
    if not found:
        raise ConfigError(
            "the checkpoint holds no fp32 masters: only one of a run with precision='bf16-true' "
            "and strategy='megatrain' does, unless it was saved with save_weights_only=True. "
            "Leave --masters out to write its weights as they are."
        )
    return found
