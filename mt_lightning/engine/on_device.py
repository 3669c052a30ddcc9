"""What follows the model to its device besides parameters: buffers, random numbers, streams."""

from __future__ import annotations

from typing import Any

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


def current_stream(device: torch.device) -> Any:
    """Return the stream on which this thread computes, None where the host does."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def set_stream(device: torch.device, stream: Any) -> None:
    """Compute on a stream from now on, behind all that the thread has started until now."""
    if device.type == "cpu" or stream == torch.accelerator.current_stream(device):
        return
    stream.wait_stream(torch.accelerator.current_stream(device))
    torch.accelerator.set_stream(stream)
