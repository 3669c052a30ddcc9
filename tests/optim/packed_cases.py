"""What the tests of packed state share: formats, scalars and gradients that try every corner."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mt_lightning.optim.packed import reference, update
from mt_lightning.optim.packed.formats import FORMATS
from mt_lightning.optim.packed.panels import PanelFormat
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.records import Format
from mt_lightning.optim.packed.scalars import AdamScalars

ALL = list(FORMATS.values())
PACKED = [format for format in ALL if not format.exact]
RECORDS = [format for format in ALL if not isinstance(format, PanelFormat)]
"""Those whose state is records alone."""
STOCHASTIC = [format for format in PACKED if not isinstance(format, PanelFormat)]


WIDTH = 50
"""Columns of the tensors of tests that do not care."""

adamw_step = partial(update.adamw_step, width=WIDTH)
decode = partial(update.decode, width=WIDTH)
encode = partial(update.encode, width=WIDTH)
reference_step = partial(reference.step, width=WIDTH)
reference_decode = partial(reference.decode, width=WIDTH)
reference_encode = partial(reference.encode, width=WIDTH)


def by_name(format: Format) -> str:
    return format.name


def scalars(step: int, **changes: Any) -> AdamScalars:
    settings: dict[str, Any] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": step,
    }
    return AdamScalars(**{**settings, **changes})


def fresh(format: Format, numel: int, width: int = WIDTH) -> torch.Tensor:
    return torch.zeros(format.state_bytes(Place(numel, width)), dtype=torch.uint8)


def wild(numel: int, seed: int) -> torch.Tensor:
    """Return values over 24 orders of magnitude, some zero and some denormal."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-21, 3, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator) * 10.0**exponents
    values[::7] = 0
    values[3::101] = 1e-42
    return values


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits agree, with every NaN alike."""
    a, b = torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0)
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
