"""The way between host memory and the device that computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Upload:
    """Bytes on their way to the device."""

    host: torch.Tensor | None
    """Source; held until it has been copied, then None."""
    device: torch.Tensor
    """Destination; valid for compute only after `Link.wait`."""


@dataclass(eq=False)
class Download:
    """A tensor on its way to the host."""

    device: torch.Tensor | None
    """Source; held until it has been copied, then None."""
    host: torch.Tensor | None
    """Destination; valid only after `Link.done`."""


class Link(ABC):
    """Moves bytes to and from one device. Used by one thread.

    Verb pairs: `upload`/`wait`, `download`/`done`; what `wait` gave is given back by `retire`.
    """

    unified: bool
    """Whether device memory *is* host memory, so that nothing is ever copied."""

    @abstractmethod
    def upload(self, host: torch.Tensor) -> Upload:
        """Start to bring host bytes (uint8, one dimension) to the device.

        The host bytes must stay as they are until `wait` has returned.
        """

    @abstractmethod
    def wait(self, upload: Upload) -> torch.Tensor:
        """Return the device bytes (uint8), valid for compute that is started after this call."""

    @abstractmethod
    def retire(self, device_tensor: torch.Tensor) -> None:
        """Give back what `wait` returned; every view of it must have died."""

    @abstractmethod
    def download(self, tensor: torch.Tensor) -> Download:
        """Start to bring a device tensor of any type to the host.

        After this call the caller must not touch `tensor` again: its bytes may be overwritten.
        """

    @abstractmethod
    def done(self, download: Download) -> torch.Tensor:
        """Wait for a download and return the tensor on the host."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all device memory."""


class HostLink(Link):
    """The link of a machine that computes where the pages lie: everything stays in place."""

    unified = True

    def upload(self, host: torch.Tensor) -> Upload:
        """Return the same tensor, ready."""
        return Upload(host=None, device=host)

    def wait(self, upload: Upload) -> torch.Tensor:
        """Return the tensor that was given."""
        return upload.device

    def retire(self, device_tensor: torch.Tensor) -> None:
        """Do nothing: the bytes belong to the host frame."""

    def download(self, tensor: torch.Tensor) -> Download:
        """Return the same tensor, done."""
        return Download(device=None, host=tensor)

    def done(self, download: Download) -> torch.Tensor:
        """Return the tensor that was given."""
        assert download.host is not None
        return download.host

    def close(self) -> None:
        """Do nothing."""
