"""One user optimizer and the pages it trains."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mt_lightning.engine.build import Build
from mt_lightning.optim.codec import StateCodec
from mt_lightning.optim.loop_step import stepper_for
from mt_lightning.optim.packed_step import PackedStepper
from mt_lightning.optim.shadow import Hyper, Stepper
from mt_lightning.pages.table import Page


@dataclass
class Trained:
    """One user optimizer and what belongs to it."""

    optimizer: torch.optim.Optimizer
    codec: StateCodec
    stepper: Stepper
    pages: list[Page]
    order: list[tuple[int, int]] = field(default_factory=list)
    """Page and position of each parameter, in the order of the param groups."""
    first_hyper: Hyper | None = None
    """Hyper-parameters of the first step."""


def trained_by(index: int, optimizer: torch.optim.Optimizer, build: Build) -> Trained:
    """Return what the optimizer of this index trains."""
    pages = [page for page in build.table if page.layout.optimizer == index]
    places = {
        id(param): (page.index, i)
        for page in pages
        for i, param in enumerate(build.members[page.index].params)
    }
    order = [places[id(param)] for group in optimizer.param_groups for param in group["params"]]
    packings = [
        packing
        for page, param in order
        for packing in build.members[page].packings[param : param + 1]
    ]
    stepper = PackedStepper(optimizer, packings) if packings else stepper_for(optimizer)
    return Trained(optimizer, build.codecs[index], stepper, pages, order)
