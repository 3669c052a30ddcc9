"""Gradients on their way from the device: how many bytes they take there, and until when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.planes import Planes
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page
from mt_lightning.tiers.link import Download, Link

_UNITS_BEHIND = 1
"""Units whose gradients may be on their way when the next one's begin to be made."""


class Leaving:
    """Counts the gradients that autograd makes on the device until they have left it.

    [Note: backward runs ahead of the device] The host starts the backward of a unit long before the
    device has come to it. Were nobody to wait, the gradients of the whole model could be on the
    device at once. So before a unit's backward is started, those of the unit before the last one
    have left.

    Args:
        link: The way from the device.
        planes: Reserves memory there.
        stats: Counters to keep.
    """

    def __init__(self, link: Link, planes: Planes, stats: Stats) -> None:
        self._link = link
        self._planes = planes
        self._stats = stats
        self._expected: dict[int, list[Reservation]] = {}
        self._downloads: dict[int, list[Download]] = {}
        self._under_way: deque[tuple[list[Reservation], list[Download]]] = deque()

    def expect(self, page: Page) -> None:
        """Reserve what autograd is about to make for `page` on the device."""
        while len(self._under_way) > _UNITS_BEHIND:
            self.settle_oldest()
        what = f"the gradients of page {page.layout.key} ({', '.join(page.layout.units)})"
        reservation = self._planes.reserve(page.layout.grad_bytes, "gradients", what)
        if reservation is not None:
            self._expected.setdefault(page.index, []).append(reservation)

    def left(self, page: Page, download: Download) -> None:
        """Take note of a gradient that is on its way."""
        self._downloads.setdefault(page.index, []).append(download)
        self._stats.bytes_downloaded += download.host.nbytes

    def complete(self, page: Page) -> None:
        """Take note that all gradients of `page` that this backward makes are on their way."""
        parts = self._expected.pop(page.index, []), self._downloads.pop(page.index, [])
        if any(parts):
            self._under_way.append(parts)

    def settle_oldest(self) -> bool:
        """Wait until the oldest gradients have left; False where none are on their way."""
        if not self._under_way:
            return False
        reservations, downloads = self._under_way.popleft()
        for download in downloads:
            self._link.done(download)
        _free(reservations)
        return True

    def reset(self) -> None:
        """Forget gradients that nobody wants any more, once they have left."""
        for index in list(self._expected):
            self._under_way.append((self._expected.pop(index), self._downloads.pop(index, [])))
        while self._under_way:
            reservations, downloads = self._under_way.popleft()
            try:
                for download in downloads:
                    self._link.done(download)
            finally:
                _free(reservations)
        self._downloads.clear()


def _free(reservations: Iterable[Reservation]) -> None:
    for reservation in reservations:
        reservation.free()
