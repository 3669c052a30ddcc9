"""What follows the model to its device besides parameters: buffers, and random numbers."""

from __future__ import annotations

import torch
from torch import nn


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Move all that `root.to(device)` would, but for parameters: those move page by page."""
    if all(buffer.device == device for buffer in root.buffers()):
        return
    root._apply(lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.to(device))


def take_rng(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's generator, None where the host's is all there is."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).get_rng_state(device)


def give_rng(device: torch.device, state: torch.Tensor | None) -> None:
    """Set the device's generator to what `take_rng` returned."""
    if state is not None:
        torch.get_device_module(device).set_rng_state(state, device)
