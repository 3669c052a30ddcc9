"""What a step can change outside of all objects: generators, and settings of torch and Python."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.backends import cuda

from mt_lightning.engine.window.draws import give_generators, take_generators


def _sdpa() -> tuple[bool, ...]:
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_sdpa(value: tuple[bool, ...]) -> None:
    enable = (
        cuda.enable_flash_sdp,
        cuda.enable_mem_efficient_sdp,
        cuda.enable_math_sdp,
        cuda.enable_cudnn_sdp,
    )
    for each, enabled in zip(enable, value, strict=True):
        each(enabled)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_filters(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "backends of scaled_dot_product_attention": (_sdpa, _set_sdpa),
    "deterministic algorithms": (_deterministic, _set_deterministic),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of matrix products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "warning filters": (lambda: list(warnings.filters), _set_filters),
}


class ProcessState:
    """The state at one moment, to be given back later.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rng = (take_generators(device), np.random.get_state(), random.getstate())
        self._settings = {name: get() for name, (get, _) in _SETTINGS.items()}

    def restore(self) -> None:
        """Set everything to what it was."""
        give_generators(self._device, self._rng[0])
        np.random.set_state(self._rng[1])
        random.setstate(self._rng[2])
        for name in self.changed_settings():
            _SETTINGS[name][1](self._settings[name])

    def changed_settings(self) -> list[str]:
        """Return what is set otherwise now, generators aside."""
        return [name for name, (get, _) in _SETTINGS.items() if get() != self._settings[name]]
