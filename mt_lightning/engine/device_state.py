"""Optimizer state on a device, for a run that fits there: brought once, stepped there.

[Note: home] The frames of the host are where state comes from and goes to. It is brought when it is
first stepped, and comes home before a commit writes it.
"""

from __future__ import annotations

import torch

from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.device_pool import DevicePool
from mt_lightning.pager.stats import Stats
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.link import DeviceFrame, Download, Link

Key = tuple[int, int]
"""Page and chunk."""


class DeviceState:
    """The state of all chunks; called by the thread that trains.

    Args:
        link: The way to the device.
        planes: Counts its memory.
        stats: Counters.
    """

    def __init__(self, link: Link, planes: DevicePool, stats: Stats) -> None:
        self._link = link
        self._planes = planes
        self._stats = stats
        self._there: dict[Key, tuple[DeviceFrame, Frame, Reservation]] = {}
        self._valid: set[Key] = set()
        self._newer: set[Key] = set()

    def bring(self, key: Key, home: Frame, nbytes: int) -> torch.Tensor:
        """Return a chunk's state on the device, `[nbytes]` uint8.

        Args:
            key: The chunk.
            home: Its frame on the host, complete.
            nbytes: Its length.
        """
        if key not in self._there:
            room = self._planes.reserve(home.nbytes, "state", "the state of the optimizer")
            self._there[key] = self._link.frame(home.nbytes), home, room
        frame = self._there[key][0]
        if key not in self._valid:
            self._link.mark(frame)
            self._link.wait(self._link.upload(home.tensor, frame))
            self._stats.bytes_uploaded += home.nbytes
            self._valid.add(key)
        return frame.tensor[:nbytes]

    def stepped(self, key: Key) -> None:
        """Take note that compute has been given what changes a chunk."""
        self._newer.add(key)

    def come_home(self) -> None:
        """Copy to the host what the device alone has."""
        begun: list[Download] = []
        for key in self._newer:
            frame, home, _ = self._there[key]
            # A view, which the link leaves as it is.
            begun.append(self._link.download(frame.tensor.view(-1), home.tensor))
            self._stats.bytes_returned += home.nbytes
        for download in begun:
            self._link.done(download)
        self._newer.clear()

    def forget(self) -> None:
        """Distrust all of it; it is brought again."""
        self._valid.clear()
        self._newer.clear()

    def close(self) -> None:
        """Give the memory back."""
        self.forget()
        for _, _, room in self._there.values():
            room.free()
        self._there.clear()
