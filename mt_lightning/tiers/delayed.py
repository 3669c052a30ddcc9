"""A link that does everything late and out of order, so that a missing wait is a wrong bit."""

from __future__ import annotations

import random

import torch

from mt_lightning.tiers.arena import use_count
from mt_lightning.tiers.link import Download, Link, Upload

_MAX_QUEUED = 3
_POISON = 0xFF  # four of them are a NaN in fp32, two a NaN in bf16


def _storage_uses(tensor: torch.Tensor) -> int:
    return use_count(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # pyright: ignore[reportCallIssue, reportArgumentType]


_SOLE_USE = _storage_uses(torch.empty(1))


class DelayedLink(Link):
    """A device made of separate host memory, for tests without a device.

    A copy runs when it is waited for, or earlier, in random order, when more than three are queued.
    Device frames are full of NaN until their copy ran and again once they are retired. The source
    of a download is filled with NaN once it was copied and no other tensor shares its storage:
    after `download(t)` the caller must not touch `t`.
    """

    unified = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._queue: list[Upload | Download] = []
        self._frames: dict[int, torch.Tensor] = {}
        self._copied: list[torch.Tensor] = []

    def upload(self, host: torch.Tensor) -> Upload:
        """Queue a copy into a poisoned device frame."""
        assert (host.dtype, host.dim()) == (torch.uint8, 1), (host.dtype, host.shape)
        device = torch.empty(host.numel(), dtype=torch.uint8).fill_(_POISON)
        self._frames[device.data_ptr()] = device
        upload = Upload(host=host, device=device)
        self._push(upload)
        return upload

    def wait(self, upload: Upload) -> torch.Tensor:
        """Run the copy if it has not run yet."""
        if upload.host is not None:
            self._run(upload)
        return upload.device

    def retire(self, device_tensor: torch.Tensor) -> None:
        """Poison the frame: a view that still lives reads NaN from now on."""
        frame = self._frames.pop(device_tensor.data_ptr(), None)
        assert frame is not None, "retired twice, or not from this link"
        for upload in [op for op in self._queue if isinstance(op, Upload) and op.device is frame]:
            self._run(upload)  # never waited for: a prefetch nobody wanted
        frame.fill_(_POISON)

    def download(self, tensor: torch.Tensor) -> Download:
        """Queue a clone of the tensor."""
        download = Download(device=tensor, host=None)
        self._push(download)
        return download

    def done(self, download: Download) -> torch.Tensor:
        """Run the copy if it has not run yet."""
        if download.host is None:
            self._run(download)
        assert download.host is not None
        return download.host

    def close(self) -> None:
        """Drop queued copies and all frames."""
        self._queue.clear()
        self._frames.clear()
        self._copied.clear()

    def _push(self, op: Upload | Download) -> None:
        self._queue.append(op)
        if len(self._queue) > _MAX_QUEUED:
            self._run(self._random.choice(self._queue))
        self._poison_copied()

    def _run(self, op: Upload | Download) -> None:
        self._queue = [other for other in self._queue if other is not op]
        if isinstance(op, Upload):
            assert op.host is not None
            with torch.inference_mode(False), torch.no_grad():
                op.device.copy_(op.host)
            op.host = None
        else:
            assert op.device is not None
            op.host = op.device.detach().clone()
            if not op.device._is_view():  # a view holds its base, which others may use
                self._copied.append(op.device)
            op.device = None
        self._poison_copied()

    def _poison_copied(self) -> None:
        """Poison the sources that no tensor but the downloaded one shares."""
        kept: list[torch.Tensor] = []
        for tensor in self._copied:
            if _storage_uses(tensor) > _SOLE_USE:
                kept.append(tensor)
            else:
                _bytes_of(tensor).fill_(_POISON)
        self._copied = kept
