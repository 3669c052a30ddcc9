"""Copies of batches, for steps that run again: a step may change its batch."""

from __future__ import annotations

from typing import TypeVar

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]

Batch = TypeVar("Batch")


def copy_batch(batch: Batch) -> Batch:
    """Return a copy of all containers and tensors; other objects are shared.

    It takes the types of batch that Lightning moves to a device. Tensors that share memory do so in
    the copy, unless they are small parts of something large.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    alone: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor.detach().clone()
        storage, own = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        if storage.data_ptr() in storages or storage.nbytes() <= 2 * own:
            shared = storages.setdefault(storage.data_ptr(), storage.clone())
            twin = torch.empty(0, dtype=tensor.dtype)
            twin.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())
        elif id(tensor) in alone:
            return alone[id(tensor)]
        else:
            twin = alone[id(tensor)] = tensor.detach().clone()
        return twin.requires_grad_(tensor.requires_grad)

    return apply_to_collection(batch, torch.Tensor, copy)
