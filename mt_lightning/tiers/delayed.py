"""A link that does everything late and out of order, so that a missing wait is a wrong bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import torch

from mt_lightning.tiers.arena import use_count
from mt_lightning.tiers.link import DeviceFrame, Download, Link, Upload

_MAX_QUEUED = 3
_POISON = 0xFF  # four of them are a NaN in fp32, two a NaN in bf16


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and wrappers hold the storage of a tensor."""
    return use_count(tensor.untyped_storage()._cdata)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # pyright: ignore[reportCallIssue, reportArgumentType]


def poison(tensor: torch.Tensor) -> None:
    """Fill the whole storage of a tensor with NaN."""
    bytes_of(tensor).fill_(_POISON)


SOLE_USE = storage_uses(torch.empty(1))


class DelayedLink(Link):
    """A device made of separate host memory, for tests without a device.

    A copy runs when it is waited for, or earlier, in random order, when more than three are queued;
    those into one host tensor keep their order. Device frames are full of NaN until their copy ran
    and again once they are free. The source of a download is filled with NaN once it was copied and
    no other tensor shares its storage: after `download(t)` the caller must not touch `t`.
    """

    unified = False

    def __init__(self, seed: int = 0, memory_bytes: int | None = None) -> None:
        self._random = random.Random(seed)
        self._memory_bytes = memory_bytes
        self._lock = threading.RLock()
        self._queue: list[Upload | Download] = []
        self._copied: list[torch.Tensor] = []

    def free_bytes(self) -> int | None:
        """Return what was given."""
        return self._memory_bytes

    def frame(self, nbytes: int) -> DeviceFrame:
        """Allocate a frame full of NaN."""
        return DeviceFrame(torch.empty(nbytes, dtype=torch.uint8).fill_(_POISON))

    def mark(self, frame: DeviceFrame) -> None:
        """Do nothing: compute is never late here."""

    def retire(self, frame: DeviceFrame) -> None:
        """Poison the frame: a view that still lives reads NaN from now on."""
        with self._lock:
            waiting = [op for op in self._queue if isinstance(op, Upload) and op.frame is frame]
        for upload in waiting:
            self.wait(upload)  # never waited for: a prefetch nobody wanted
        frame.tensor.fill_(_POISON)

    def upload(
        self, host: torch.Tensor, frame: DeviceFrame, after: Callable[[], object] | None = None
    ) -> Upload:
        """Queue a copy into a frame, which is poisoned until then."""
        assert (host.dtype, host.dim()) == (torch.uint8, 1), (host.dtype, host.shape)
        assert host.numel() == frame.nbytes
        frame.tensor.fill_(_POISON)
        upload = Upload(host=host, frame=frame, way=after)
        self._push(upload)
        return upload

    def taken(self, upload: Upload) -> None:
        """Run the copy if it has not run yet."""
        if upload.way is not None:
            upload.way()  # not under the lock: it may wait for somebody who needs it
        with self._lock:
            if upload.host is not None:
                self._run(upload)

    def wait(self, upload: Upload) -> torch.Tensor:
        """Run the copy if it has not run yet."""
        self.taken(upload)
        return upload.frame.tensor

    def download(self, tensor: torch.Tensor, into: torch.Tensor, *, add: bool = False) -> Download:
        """Queue a copy of the tensor."""
        assert tensor.shape == into.shape
        if not add:
            poison(into)
        download = Download(device=tensor, host=into, add=add)
        self._push(download)
        return download

    def done(self, download: Download) -> torch.Tensor:
        """Run the copy, and those into the same tensor before it, if they have not run yet."""
        with self._lock:
            if download.device is not None:
                self._run(download)
            return download.host

    def close(self) -> None:
        """Drop queued copies and all frames."""
        with self._lock:
            self._queue.clear()
            self._copied.clear()

    def _push(self, op: Upload | Download) -> None:
        with self._lock:
            self._queue.append(op)
            ready = [op for op in self._queue if isinstance(op, Download) or op.way is None]
            if len(self._queue) > _MAX_QUEUED and ready:
                self._run(self._random.choice(ready))
            self._poison_copied()

    def _run(self, op: Upload | Download) -> None:
        if isinstance(op, Download):
            for other in list(self._queue):
                if other is op:
                    break
                if isinstance(other, Download) and other.host is op.host:
                    self._run(other)
        self._queue = [other for other in self._queue if other is not op]
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(op, Upload):
                assert op.host is not None
                op.frame.tensor.copy_(op.host)
                op.host = None
            else:
                assert op.device is not None
                op.host.add_(op.device) if op.add else op.host.copy_(op.device)
                if not op.device._is_view():  # a view holds its base, which others may use
                    self._copied.append(op.device)
                op.device = None
        self._poison_copied()

    def _poison_copied(self) -> None:
        """Poison the sources that no tensor but the downloaded one shares."""
        kept: list[torch.Tensor] = []
        for tensor in self._copied:
            if storage_uses(tensor) > SOLE_USE:
                kept.append(tensor)
            else:
                poison(tensor)
        self._copied = kept
