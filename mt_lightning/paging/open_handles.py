"""The handles of this process that have not been closed."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

log = logging.getLogger(__name__)


class Handle(Protocol):
    """What is asked of a handle."""

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Page and position of each parameter by its `id`."""
        ...

    def tell_unclosed(self) -> None:
        """Say what is not committed."""


_open: weakref.WeakSet[Handle] = weakref.WeakSet()


def add(handle: Handle) -> None:
    """Take note of a handle that holds a model."""
    _open.add(handle)


def discard(handle: Handle) -> None:
    """Take note that it holds none any more."""
    _open.discard(handle)


def paged_parameters() -> set[int]:
    """Return the `id` of every parameter that is on pages."""
    return {each for handle in _open for each in handle.places}


@atexit.register
def _tell_unclosed() -> None:
    # Nothing can be written any more: Python has ended the threads that would do it.
    for handle in list(_open):
        handle.tell_unclosed()
