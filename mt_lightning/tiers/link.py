"""The way between host memory and the device that computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mt_lightning.tiers.arena import use_count


class DeviceFrame:
    """A piece of device memory that one page's bytes live in; its contents are undefined at first.

    Attributes:
        nbytes: Size.
        tensor: `[nbytes]` uint8 on the device; every view of it shares one storage.
        last_use: What has to end before the frame may be written to; the link's own business.
    """

    __slots__ = ("_cdata", "_resting_count", "_storage", "last_use", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Wrap a tensor that nobody else holds a view of."""
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.last_use: Any = None
        # The wrapper is kept: making one later would itself count as a use.
        self._storage = tensor.untyped_storage()
        self._cdata = self._storage._cdata
        self._resting_count = use_count(self._cdata)

    def in_use(self) -> bool:
        """Tell whether a view of `tensor` lives somewhere; `tensor` itself does not count."""
        return use_count(self._cdata) > self._resting_count


@dataclass(eq=False)
class Upload:
    """Bytes on their way to the device."""

    host: torch.Tensor | None
    """Source; held until it has been taken, then None."""
    frame: DeviceFrame
    """Destination; valid for compute only after `Link.wait`."""
    way: Any = None
    """What the link waits for."""


@dataclass(eq=False)
class Download:
    """A tensor on its way to the host."""

    device: torch.Tensor | None
    """Source; held until it has been copied, then None."""
    host: torch.Tensor
    """Destination; its contents are valid only after `Link.done`."""
    add: bool = False
    """Whether it is added to what the destination holds."""
    way: Any = None
    """What the link waits for."""


class Link(ABC):
    """Moves bytes to and from one device.

    Pairs: `frame`/`retire`, `upload`/`wait`, `download`/`done`. All but `done` are called by the
    thread that runs the model (in backward, by the one that autograd runs it on); `done` by any.
    """

    unified: bool
    """Whether device memory *is* host memory, so that nothing is ever copied."""
    device: torch.device = torch.device("cpu")
    """Where the model computes."""
    staging_bytes: int = 0
    """Host memory that copies pass through."""
    shared: bool = False
    """Whether the device has no memory of its own: frames there take bytes of the host."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the memory that the device has left, None where there is no telling."""

    @abstractmethod
    def frame(self, nbytes: int) -> DeviceFrame:
        """Allocate a frame."""

    @abstractmethod
    def mark(self, frame: DeviceFrame) -> None:
        """Note that compute which was started until now may read the frame, and none after it."""

    @abstractmethod
    def retire(self, frame: DeviceFrame) -> None:
        """Let go of a frame's bytes; no view of it lives, though compute may still read it.

        It may be uploaded to again, or be dropped: then `wait` has returned for every upload.
        """

    @abstractmethod
    def upload(
        self, host: torch.Tensor, frame: DeviceFrame, after: Callable[[], object] | None = None
    ) -> Upload:
        """Start to bring host bytes (uint8, one dimension) to the device.

        The host bytes must stay as they are until `taken` or `wait` has returned.

        Args:
            host: The bytes.
            frame: Where they go, of the same length.
            after: Returns once the host bytes are there; raises where they cannot be had.
        """

    @abstractmethod
    def taken(self, upload: Upload) -> None:
        """Wait until the host bytes may change."""

    @abstractmethod
    def wait(self, upload: Upload) -> torch.Tensor:
        """Return the device bytes (uint8), valid for compute that is started after this call."""

    @abstractmethod
    def download(self, tensor: torch.Tensor, into: torch.Tensor, *, add: bool = False) -> Download:
        """Start to bring a dense device tensor of any type to the host.

        After this call the caller must not touch `tensor` again: its bytes may be overwritten.
        Downloads into the same host tensor take effect in the order in which they were started.

        Args:
            tensor: The tensor.
            into: A host tensor that lies in memory as `tensor` does.
            add: Whether to add to what `into` holds by then, instead of replacing it.
        """

    @abstractmethod
    def done(self, download: Download) -> torch.Tensor:
        """Wait for a download and return the tensor on the host."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all device memory."""


class HostLink(Link):
    """The link of a machine that computes where the pages lie: there is nothing to move."""

    unified = True

    def free_bytes(self) -> int | None:
        """Return None: it is the host's."""
        return None

    def frame(self, nbytes: int) -> DeviceFrame:
        """Refuse: pages are computed on where they lie."""
        raise AssertionError("there is no device")

    def mark(self, frame: DeviceFrame) -> None:
        """Refuse."""
        raise AssertionError("there is no device")

    def retire(self, frame: DeviceFrame) -> None:
        """Refuse."""
        raise AssertionError("there is no device")

    def upload(
        self, host: torch.Tensor, frame: DeviceFrame, after: Callable[[], object] | None = None
    ) -> Upload:
        """Refuse."""
        raise AssertionError("there is no device")

    def taken(self, upload: Upload) -> None:
        """Refuse."""
        raise AssertionError("there is no device")

    def wait(self, upload: Upload) -> torch.Tensor:
        """Refuse."""
        raise AssertionError("there is no device")

    def download(self, tensor: torch.Tensor, into: torch.Tensor, *, add: bool = False) -> Download:
        """Refuse."""
        raise AssertionError("there is no device")

    def done(self, download: Download) -> torch.Tensor:
        """Refuse."""
        raise AssertionError("there is no device")

    def close(self) -> None:
        """Do nothing."""
