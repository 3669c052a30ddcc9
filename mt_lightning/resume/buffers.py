"""The buffers of a module: those that never change are kept once, the others with every commit."""

from __future__ import annotations

import io

import torch
import xxhash
from torch import nn

from mt_lightning.engine.kept import keep, kept
from mt_lightning.tiers.store import Store


class Buffers:
    """Follows the buffers of one module through a fit.

    Args:
        module: The module, as it came.
        store: Where what does not change is kept.
        name: What a run that goes on kept them under, None for a new run.
    """

    def __init__(self, module: nn.Module, store: Store, name: str | None) -> None:
        self._module = module
        if name is not None:
            first = torch.load(io.BytesIO(kept(store, name)), weights_only=True)
            self.give(first)
        else:
            first = {key: buffer.detach() for key, buffer in module.named_buffers()}
            buffer = io.BytesIO()
            torch.save(first, buffer)
            name = keep(store, buffer.getvalue())
        self.name = name
        """The name under which they are kept as they were at the start of the run."""
        self._first = {key: _digest(value) for key, value in first.items()}

    def changed(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are not what they were at the start of the run."""
        return {
            key: buffer.detach()
            for key, buffer in self._module.named_buffers()
            if self._first.get(key) != _digest(buffer)
        }

    def give(self, values: dict[str, torch.Tensor]) -> None:
        """Set buffers; those that were made or resized in training are replaced."""
        for key, value in values.items():
            path, _, own = key.rpartition(".")
            holder = self._module.get_submodule(path)
            now = holder._buffers.get(own)
            if now is not None and now.shape == value.shape and now.dtype == value.dtype:
                with torch.no_grad():
                    now.copy_(value)
            elif own in holder._buffers:
                holder._buffers[own] = value.clone()


def _digest(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, int]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return tensor.dtype, tensor.shape, xxhash.xxh3_64_intdigest(data)
