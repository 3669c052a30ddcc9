"""The rests of masters from one fit to the next, while their parameters are parked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mt_lightning.engine.build import Build
from mt_lightning.engine.parking import Parking
from mt_lightning.engine.plain import PlainState
from mt_lightning.optim.codec import RawCodec, StateCodec
from mt_lightning.pages.state import MASTER_REST
from mt_lightning.pages.table import Page

Rests = dict[int, torch.Tensor]
"""By `id` of a parameter, the rest of its master."""


def carried_rests(build: Build, parking: Parking, plain: PlainState) -> Rests:
    """Return the rests of all parked parameters that still have the weights these belong to.

    Args:
        build: The pages of the last fit.
        parking: Where the parameters are parked; it tells which were written to.
        plain: Maps their state.
    """
    rests: Rests = {}
    for page in build.table:
        if page.state_layout.has_masters and page.state.slot is not None:
            written, params = parking.different(page), build.members[page.index].params
            for param, rest in _mapped(build, page, plain):
                if param not in written:
                    rests[id(params[param])] = rest
    return rests


def named_rests(build: Build, plain: PlainState) -> dict[str, torch.Tensor]:
    """Return all rests by the names of their parameters.

    Args:
        build: The pages.
        plain: Maps their state.
    """
    return {
        page.layout.params[param].name: rest
        for page in build.table
        if page.state_layout.has_masters and page.state.slot is not None
        for param, rest in _mapped(build, page, plain)
    }


def _mapped(build: Build, page: Page, plain: PlainState) -> Iterator[tuple[int, torch.Tensor]]:
    mapping = plain.map(page, codec_of(build, page))
    for tensor in page.state_layout.tensors:
        if tensor.key == MASTER_REST:
            flat = mapping.tensor(tensor.offset, tensor.nbytes).view(tensor.dtype)
            yield tensor.param, flat.as_strided(tensor.shape, tensor.stride)


def codec_of(build: Build, page: Page) -> StateCodec:
    """Return how the state of a page is kept: as it is, where no optimizer trains it."""
    index = page.layout.optimizer
    return RawCodec() if index is None else build.codecs[index]


def sources(
    page: Page, params: list[nn.Parameter], rests: Rests, written: set[int] | None = None
) -> dict[int, torch.Tensor | None]:
    """Return what the rests of a page are made of when a fit begins; see `fill_rest`.

    Args:
        page: The page.
        params: Its parameters, which still hold their values.
        rests: What is carried over from the last fit.
        written: The parameters to be written; None: all.
    """
    found: dict[int, torch.Tensor | None] = {}
    for i in page.state_layout.rest_params:
        if written is None or i in written:
            data = params[i].data
            found[i] = data if data.dtype == torch.float32 else rests.get(id(params[i]))
    return found
