"""What an optimizer keeps for a parameter beside tensors of its size: step counts and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mt_lightning.errors import StepError
from mt_lightning.pages.table import ParamState

_LARGEST_SMALL_NUMEL = 64


def small_values(
    before: ParamState, group: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return copies of what a parameter keeps beside its state, where its optimizer wants them.

    Args:
        before: Its state.
        group: The param group; torch's fused and capturable optimizers count steps on the device.
        device: Where the parameter is.
    """
    there = bool(group.get("fused") or group.get("capturable"))
    return {
        key: value.to(device if there else value.device, copy=True)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in before.values.items()
    }


def take_small(name: str, state: dict[str, object], tensors: dict[str, torch.Tensor]) -> ParamState:
    """Split a parameter's new state into what lies in the frame and what is small."""
    present, values = [], {}
    for key, value in state.items():
        target = tensors.get(key)
        if target is not None and isinstance(value, torch.Tensor):
            if value.data_ptr() != target.data_ptr():
                target.copy_(value.view_as(target))
            present.append(key)
        elif isinstance(value, torch.Tensor) and value.numel() > _LARGEST_SMALL_NUMEL:
            raise StepError(
                f"the optimizer began to keep {key!r} ({value.numel()} values) for {name}, for "
                "which no room was laid out at start. Set the hyper-parameter that needs it from "
                "the beginning."
            )
        else:
            values[key] = value
    return ParamState(tuple(present), values)
