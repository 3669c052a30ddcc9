"""Weights that user code may write to at any time, as the last update left them.

[Note: writes on a device] What differs from them was written by user code, and is a weight whose
master has no rest any more. Where updates run on a device, the comparison is made there just before
the update, and what comes of it is a factor of the rest: nobody waits for an answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mt_lightning.pages.table import Page


class Seen:
    """Copies of weight planes, beside the planes that they are compared with."""

    def __init__(self) -> None:
        self._planes: dict[int, torch.Tensor] = {}

    def __contains__(self, page: Page) -> bool:
        """Return whether a page is watched."""
        return page.index in self._planes

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of each page that is watched, and its weights as they were."""
        return iter(list(self._planes.items()))

    def watch(self, page: Page, plane: torch.Tensor) -> None:
        """Remember the weights of a page from now on."""
        self._planes[page.index] = plane.clone()

    def take(self, page: Page, plane: torch.Tensor) -> None:
        """Remember the weights of a page anew, where it is watched."""
        if page.index in self._planes:
            self._planes[page.index].copy_(plane)

    def unwritten(self, page: Page, plane: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return by parameter 1 (0-D) where nobody has written to it, else 0; none if unwatched."""
        if page.index not in self._planes:
            return {}
        same = self._planes[page.index] == plane
        return {i: bytes_of(page, i, same).all().short() for i in page.state_layout.rest_params}


def bytes_of(page: Page, param: int, plane: torch.Tensor) -> torch.Tensor:
    """Return the part of a plane, or of what is known of each of its bytes, that a parameter is."""
    spec = page.layout.params[param]
    return plane[spec.offset : spec.offset + spec.nbytes]
