"""The states of the random number generators that training draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def take_rng() -> dict[str, Any]:
    """Return the states of torch, numpy and Python, as tensors and plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "device": _device_state(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        # As a tensor: hundreds of numbers one by one take longer to write than all the rest.
        "python": (version, torch.tensor(internal), gauss_next),
    }


def give_rng(state: dict[str, Any]) -> None:
    """Set the generators to what `take_rng` returned."""
    name, keys, position, has_gauss, gauss = state["numpy"]
    torch.set_rng_state(state["torch"])
    on_device = state.get("device")  # runs of earlier versions had no device
    if on_device is not None and (module := _device_module()) is not None:
        module.set_rng_state(on_device)
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    if isinstance(internal, torch.Tensor):  # runs of earlier versions hold the numbers one by one
        internal = internal.tolist()
    random.setstate((version, tuple(internal), gauss_next))


def _device_module() -> Any:
    """Return torch's module of the accelerator in use, None where none is."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return module if module is not None and module.is_initialized() else None


def _device_state() -> torch.Tensor | None:
    module = _device_module()
    return None if module is None else module.get_rng_state()
