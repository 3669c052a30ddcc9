"""The link to an accelerator: copies on streams of their own, through page-locked staging buffers.

[Note: three streams]
compute:  the caller's stream, whichever it is when a method is called. What the model does.
upload:   brings the weights of later units while compute runs earlier ones.
download: takes gradients away while compute runs the backward of the units before.

[Note: who waits for whom]
1. An upload into a frame waits for the compute that read the frame last, or that used its memory
   last before it was a frame: an event on the compute stream, recorded by `mark` as soon as it is
   known that nothing later reads the frame, else by `retire`; by `frame` for new memory.
2. Compute waits for the upload of what it reads (`wait`), never for any later one.
3. A download waits for the compute that was started before it: the gradient is made by that.
4. A gradient's storage is held until its download has run; only then may the caching allocator,
   which knows of the compute stream alone, hand it out again.
5. A staging buffer is filled again, or given back, once the copy out of it has run, and read once
   the copy into it has.
6. A frame goes back to the caching allocator only after compute has been made to wait for every
   upload into it: the allocator takes memory as free for whatever compute does next.

[Note: staging]
Pages lie in ordinary memory, which a copy engine cannot read by itself. A thread per direction
moves them piece by piece between there and a few page-locked buffers. The number of page-locked
bytes is a constant, so it does not grow with the model; host bytes may change as soon as they were
copied into a buffer, long before the device has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mt_lightning.tiers.device import Device
from mt_lightning.tiers.link import DeviceFrame, Download, Link, Upload

PIECE_BYTES = 16 << 20
"""Length of a staging buffer."""
NUM_PIECES = 2
"""Buffers for each direction: one is copied by the host while the device copies the other."""


class AcceleratorLink(Link):
    """Moves bytes between host memory and one accelerator.

    Args:
        device: Streams, events and memory of the accelerator.
        piece_bytes: Length of a staging buffer.
        num_pieces: How many each direction has.
    """

    unified = False

    def __init__(
        self, device: Device, piece_bytes: int = PIECE_BYTES, num_pieces: int = NUM_PIECES
    ) -> None:
        self._device = device
        self.device = device.torch_device
        self.shared = device.shared
        self.staging_bytes = 2 * num_pieces * piece_bytes
        self._to_device = device.stream("upload")
        self._to_host = device.stream("download")
        self._up = device.lane("upload")
        self._down = device.lane("download")
        self._piece_bytes = piece_bytes
        self._filled = deque((device.staging(piece_bytes), None) for _ in range(num_pieces))
        self._drained = deque(device.staging(piece_bytes) for _ in range(num_pieces))

    def free_bytes(self) -> int | None:
        """Ask the device."""
        return self._device.free_bytes()

    # -- frames -----------------------------------------------------------------------------------
    def frame(self, nbytes: int) -> DeviceFrame:
        """Allocate a frame; what used its memory before may still run."""
        frame = DeviceFrame(self._device.empty(nbytes))
        self.mark(frame)
        return frame

    def mark(self, frame: DeviceFrame) -> None:
        """Let what is written to the frame next wait for the compute that was started until now."""
        frame.last_use = self._device.record(self._device.current_stream())

    def retire(self, frame: DeviceFrame) -> None:
        """Let what is written to the frame next wait for compute, where that is not known yet."""
        if frame.last_use is None:
            self.mark(frame)

    # -- to the device ----------------------------------------------------------------------------
    def upload(
        self, host: torch.Tensor, frame: DeviceFrame, after: Callable[[], object] | None = None
    ) -> Upload:
        """Queue the copy of host bytes, piece by piece, on the upload stream."""
        assert (host.dtype, host.dim()) == (torch.uint8, 1), (host.dtype, host.shape)
        assert host.numel() == frame.nbytes
        upload = Upload(host=host, frame=frame)
        upload.way = self._up.submit(partial(self._fill, upload, frame.last_use), after)
        return upload

    def _fill(self, upload: Upload, last_use: Any) -> Any:
        host, device = upload.host, self._device
        assert host is not None
        device.wait(self._to_device, last_use)
        for start in range(0, host.numel(), self._piece_bytes):
            buffer, copied = self._filled.popleft()
            if copied is not None:
                device.block(copied)
            size = min(self._piece_bytes, host.numel() - start)
            buffer[:size].copy_(host[start : start + size])
            device.copy(upload.frame.tensor, start, buffer, 0, size, self._to_device)
            self._filled.append((buffer, device.record(self._to_device)))
        upload.host = None
        return device.record(self._to_device)

    def taken(self, upload: Upload) -> None:
        """Wait until the host bytes lie in staging buffers, or have left them."""
        upload.way.result()

    def wait(self, upload: Upload) -> torch.Tensor:
        """Let compute that is started from now on wait for the upload."""
        self._device.wait(self._device.current_stream(), upload.way.result())
        upload.frame.last_use = None  # compute may read it from here on
        return upload.frame.tensor

    # -- to the host ------------------------------------------------------------------------------
    def download(self, tensor: torch.Tensor, into: torch.Tensor, *, add: bool = False) -> Download:
        """Queue the copy of a gradient behind the compute that makes it."""
        assert tensor.dtype == into.dtype
        assert tensor.numel() < 2 or tensor.stride() == into.stride()
        made = self._device.record(self._device.current_stream())
        download = Download(device=tensor, host=into, add=add)
        download.way = self._down.submit(partial(self._drain, download, made))
        return download

    def _drain(self, download: Download, made: Any) -> None:
        device, flat = self._device, _flat(download.host)
        assert download.device is not None
        source = _flat(download.device)
        device.wait(self._to_host, made)
        step = self._piece_bytes // flat.element_size()
        under_way: deque[tuple[torch.Tensor, Any, int, int]] = deque()

        def land() -> None:
            buffer, copied, first, count = under_way.popleft()
            device.block(copied)
            values = buffer[: count * flat.element_size()].view(flat.dtype)
            mine = flat[first : first + count]
            mine.add_(values) if download.add else mine.copy_(values)
            self._drained.append(buffer)

        try:
            for first in range(0, flat.numel(), step):
                if not self._drained:
                    land()
                count = min(step, flat.numel() - first)
                buffer = self._drained.popleft()
                at, nbytes = first * flat.element_size(), count * flat.element_size()
                device.copy(buffer, 0, source, at, nbytes, self._to_host)
                under_way.append((buffer, device.record(self._to_host), first, count))
            while under_way:
                land()
        finally:
            self._drained.extend(piece[0] for piece in under_way)
        download.device = None

    def done(self, download: Download) -> torch.Tensor:
        """Wait until the gradient lies in host memory."""
        download.way.result()
        return download.host

    def close(self) -> None:
        """End both threads and let go of all memory."""
        self._up.close()
        self._down.close()
        for _, copied in self._filled:
            if copied is not None:
                self._device.block(copied)  # the device may still read it
        self._filled.clear()
        self._drained.clear()
        self._device.close()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as a 1-D view, in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
