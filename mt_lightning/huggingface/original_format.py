"""Weights as the checkpoints of a model have them, where transformers keeps them otherwise in RAM.

transformers fuses some weights when it loads a model (the experts of a mixture become one tensor)
and takes them apart when it saves. Here that is done tensor by tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from typing_extensions import override

from mt_lightning.export.weights import Facts, RenamedWeights, Weights, bytes_of
from mt_lightning.pages.sizes import BLOCK_BYTES

log = logging.getLogger(__name__)


def in_original_format(weights: Weights, model: PreTrainedModel) -> Weights:
    """Return weights under the names, and in the shapes, that transformers saves them in.

    Where a saved tensor would be made of several of the model's, all stay as the model has them;
    `from_pretrained` reads both.

    Args:
        weights: The weights, under the names that the model has.
        model: The model, which may be on meta.
    """
    facts = weights.facts()
    metas = {n: torch.empty(f.shape, dtype=f.dtype, device="meta") for n, f in facts.items()}
    saved = revert_weight_conversion(model, dict(metas))
    owner = {id(tensor): name for name, tensor in metas.items()}
    renamed = {new: owner[id(tensor)] for new, tensor in saved.items() if id(tensor) in owner}
    rest = [name for name in metas if name not in set(renamed.values())]
    if not rest:
        return RenamedWeights(weights, renamed)
    parts: dict[str, dict[str, Facts]] = {}
    found: dict[str, Facts] = {}
    for name in rest:
        try:
            parts[name] = _facts(revert_weight_conversion(model, {name: metas[name]}))
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            log.info("%s is saved as the model has it: %s", name, error)
            return weights
        found |= parts[name]
    expected = _facts({new: tensor for new, tensor in saved.items() if new not in renamed})
    if found != expected or sum(map(len, parts.values())) != len(found):
        log.info("%d tensors are saved as the model has them: several make one.", len(rest))
        return weights
    return _ConvertedWeights(weights, model, renamed, parts)


def _facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Facts]:
    return {name: Facts(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


class _ConvertedWeights(Weights):
    def __init__(
        self,
        inner: Weights,
        model: PreTrainedModel,
        renamed: Mapping[str, str],
        parts: Mapping[str, Mapping[str, Facts]],
    ) -> None:
        self._inner = inner
        self._model = model
        self._renamed = renamed
        self._source = {new: name for name, made in parts.items() for new in made}
        new_names = {old: new for new, old in renamed.items()}
        self._facts: dict[str, Facts] = {}
        for name, facts in inner.facts().items():
            self._facts |= parts.get(name) or {new_names[name]: facts}
        self._made: tuple[str, dict[str, torch.Tensor]] | None = None

    @override
    def facts(self) -> Mapping[str, Facts]:
        """See `Weights.facts`."""
        return self._facts

    @override
    def pieces(self, name: str) -> Iterator[memoryview]:
        """See `Weights.pieces`."""
        if name in self._renamed:
            yield from self._inner.pieces(self._renamed[name])
            return
        data = bytes_of(self.tensor(name))
        for start in range(0, data.nbytes, BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]

    @override
    def tensor(self, name: str) -> torch.Tensor:
        """See `Weights.tensor`."""
        if name in self._renamed:
            return self._inner.tensor(self._renamed[name])
        source = self._source[name]
        if self._made is None or self._made[0] != source:
            self._made = None
            tensor = self._inner.tensor(source)
            self._made = (source, revert_weight_conversion(self._model, {source: tensor}))
        return self._made[1][name]
