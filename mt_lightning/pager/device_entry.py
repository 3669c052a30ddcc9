"""What the pool of a device knows of a page it holds."""

from __future__ import annotations

from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.entry import Entry
from mt_lightning.pager.pool import PoolEntry
from mt_lightning.pages.table import Page
from mt_lightning.tiers.link import DeviceFrame, Upload


class DeviceEntry(Entry[DeviceFrame]):
    """One page's weights on the device; dirty where they were updated there.

    Attributes:
        stale: Whether the page has changed since.
        behind_update: Whether the copy waits for an update, whose version it will hold.
        upload: The copy, until compute waits for it.
        source: The frame on the host, as long as the copy may read it.
    """

    def __init__(self, page: Page, frame: DeviceFrame, reservation: Reservation) -> None:
        super().__init__(page, frame, reservation)
        self.stale = False
        self.version = page.version
        self.behind_update = False
        self.upload: Upload | None = None
        self.source: PoolEntry | None = None

    def is_of(self, version: int) -> bool:
        """Return whether it holds that version of the page, known to be the last one."""
        if self.behind_update:
            # It was brought behind the update that has ended by now.
            self.version, self.behind_update = version, False
        return not self.stale and self.version == version

    def was_updated(self) -> None:
        """Take note that the page's last version is here and nowhere else."""
        self.version, self.dirty, self.stale = self.page.version, True, False
