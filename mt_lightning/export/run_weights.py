"""The weights of a committed run, read from its pages block by block, each block verified."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from mt_lightning.engine.committed import Committed
from mt_lightning.errors import CorruptPageError
from mt_lightning.export.weights import Facts, TensorWeights, Weights, bytes_of
from mt_lightning.pages.layout import PageLayout, ParamSpec
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.resume.description import DESCRIPTION_KEY
from mt_lightning.resume.packer import unpack
from mt_lightning.tiers.run_files import Payload


@dataclass(frozen=True)
class _Place:
    layout: PageLayout
    spec: ParamSpec


class RunWeights(Weights):
    """Parameters and buffers of a committed run; nothing is in RAM but one block.

    Args:
        run: The run.

    Raises:
        CorruptPageError: What the commit names is gone or damaged.
        StorageError: It cannot be read.
    """

    def __init__(self, run: Committed) -> None:
        self._run = run
        self._places = {
            spec.name: _Place(layout, spec) for layout in run.layouts for spec in layout.params
        }
        state = unpack(run.run_state) if run.run_state is not None else {}
        name = state.get(DESCRIPTION_KEY)
        self.description: dict[str, Any] = _parse(name, run.kept(name)) if name else {}
        """What the run wrote down of its module, empty where it did not."""
        self._buffers = TensorWeights(self._read_buffers(state))
        self._open: tuple[str, Any, Payload] | None = None
        self._block: tuple[str, int, bytes] | None = None

    def _read_buffers(self, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        name = state.get("kept_buffers")
        if name is None:
            return {}
        try:
            first = torch.load(io.BytesIO(self._run.kept(name)), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CorruptPageError(None, f"the buffers cannot be read: {error}", name) from error
        found = {**first, **state["buffers"]}
        persistent = self.description.get("persistent_buffers")
        return {n: t for n, t in found.items() if persistent is None or n in persistent}

    @override
    def facts(self) -> Mapping[str, Facts]:
        """See `Weights.facts`."""
        params = {name: Facts(p.spec.dtype, p.spec.shape) for name, p in self._places.items()}
        return {**params, **self._buffers.facts()}

    @override
    def aliases(self) -> Mapping[str, str]:
        """See `Weights.aliases`."""
        tied = self.description.get("tied", {})
        known = {name: first for name, first in tied.items() if first in self._places}
        return {**known, **self._buffers.aliases()}

    @override
    def pieces(self, name: str) -> Iterator[memoryview]:
        """See `Weights.pieces`."""
        place = self._places.get(name)
        if place is None:
            yield from self._buffers.pieces(name)
        elif _in_rows(place.spec):
            yield from self._span(place)
        else:
            data = bytes_of(self.tensor(name))
            for start in range(0, data.nbytes, BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]

    @override
    def tensor(self, name: str) -> torch.Tensor:
        """See `Weights.tensor`."""
        place = self._places.get(name)
        if place is None:
            return self._buffers.tensor(name)
        spec = place.spec
        data = torch.empty(spec.nbytes, dtype=torch.uint8)
        memory, at = data.numpy().data, 0
        for piece in self._span(place):
            memory[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return data.view(spec.dtype).as_strided(spec.shape, spec.stride)

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = self._block = None

    def _span(self, place: _Place) -> Iterator[memoryview]:
        """Yield the bytes of a parameter as they lie in its page."""
        start, stop = place.spec.offset, place.spec.offset + place.spec.nbytes
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first = number * BLOCK_BYTES
            block = self._read(place.layout, number)
            yield memoryview(block)[max(0, start - first) : stop - first]

    def _read(self, layout: PageLayout, number: int) -> bytes:
        """Return one block; neighbours in a page share it, so the last one is held."""
        file, sums = self._run.weight_file(layout)
        if self._block is not None and self._block[:2] == (file, number):
            return self._block[2]
        if self._open is None or self._open[0] != file:
            self.close()
            opening = self._run.files.open(file, layout.nbytes)
            self._open = (file, opening, opening.__enter__())
        first = number * BLOCK_BYTES
        nbytes = min(BLOCK_BYTES, layout.nbytes - first)
        self._block = None
        block = self._open[2].read_block(first, nbytes, sums[number])
        self._block = (file, number, block)
        return block


def _in_rows(spec: ParamSpec) -> bool:
    return torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous()


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CorruptPageError(
            None, f"the description of the module is damaged: {error}", name
        ) from error
    if not isinstance(found, dict):
        raise CorruptPageError(None, "the description of the module is damaged", name)
    return found
