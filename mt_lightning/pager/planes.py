"""Where the weights of a page are while its unit computes: in its frame, or on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import PoolEntry
from mt_lightning.pages.table import Page


class Planes(ABC):
    """The weight planes that parameters show. A page that is brought stays until released.

    Attributes:
        ahead_bytes: How far ahead pages are brought, counted in all that is used until then.
    """

    ahead_bytes = 0

    @abstractmethod
    def bring(self, page: Page, source: PoolEntry) -> None:
        """Begin to bring a page to where it computes; `source` is pinned and may yet be read."""

    @abstractmethod
    def plane(self, page: Page) -> torch.Tensor:
        """Return the plane (uint8) of a page that was brought, valid for compute from now on."""

    @abstractmethod
    def release(self, page: Page) -> None:
        """Undo one `bring`; the parameters show the plane no more."""

    @abstractmethod
    def holds(self, page: Page) -> bool:
        """Return whether bringing the page would move nothing."""

    @abstractmethod
    def prefetch(self, page: Page) -> bool:
        """Begin to bring a page before it is needed; False where nothing later should be either."""

    @abstractmethod
    def keep(self, page: Page, source: PoolEntry) -> torch.Tensor:
        """Bring a page for good, and return its plane."""

    @abstractmethod
    def changes(self, page: Page) -> None:
        """Make the page's frame ready to be written to; other copies of it are old then.

        What user code has written to a page that is kept comes home first.
        """

    @abstractmethod
    def changed(self, page: Page) -> None:
        """Let a page that is kept show what its frame holds now."""

    @abstractmethod
    def reserve(self, nbytes: int, purpose: str, what: str) -> Reservation | None:
        """Make room where it computes, beside the planes; None where that is the host's."""

    @abstractmethod
    def is_ahead(self, page: Page) -> bool:
        """Return whether the last version of a page is here alone."""

    @abstractmethod
    def on_host(self, plane: torch.Tensor) -> torch.Tensor:
        """Return a copy of what lies where it computes, once compute has made it."""

    @abstractmethod
    def come_home(self) -> None:
        """Let frames of the host hold the last version of every page."""

    @abstractmethod
    def forget_updates(self) -> None:
        """Distrust versions that are here alone."""

    @abstractmethod
    def relieve(self) -> bool:
        """Give host memory back that copies under way hold; False where there are none."""

    @abstractmethod
    def reset(self) -> None:
        """End every use but that of pages that are kept; nobody is left who would."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every plane; nothing is bound."""


class HostPlanes(Planes):
    """Pages compute in the frames they were read into."""

    def __init__(self) -> None:
        self._sources: dict[int, PoolEntry] = {}

    def bring(self, page: Page, source: PoolEntry) -> None:
        """Note the frame."""
        self._sources[page.index] = source

    def plane(self, page: Page) -> torch.Tensor:
        """Return the frame."""
        return self._sources[page.index].frame.tensor

    def release(self, page: Page) -> None:
        """Do nothing: whoever pinned the frame releases it."""

    def holds(self, page: Page) -> bool:
        """Return False: the frame has to be read first."""
        return False

    def prefetch(self, page: Page) -> bool:
        """Return False: what is read ahead is where it should be."""
        return False

    def keep(self, page: Page, source: PoolEntry) -> torch.Tensor:
        """Return the frame."""
        return source.frame.tensor

    def changes(self, page: Page) -> None:
        """Do nothing."""

    def changed(self, page: Page) -> None:
        """Do nothing."""

    def reserve(self, nbytes: int, purpose: str, what: str) -> Reservation | None:
        """Return None."""
        return None

    def is_ahead(self, page: Page) -> bool:
        """Return False."""
        return False

    def on_host(self, plane: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return plane

    def come_home(self) -> None:
        """Do nothing."""

    def forget_updates(self) -> None:
        """Do nothing."""

    def relieve(self) -> bool:
        """Return False."""
        return False

    def reset(self) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Forget the frames."""
        self._sources.clear()
