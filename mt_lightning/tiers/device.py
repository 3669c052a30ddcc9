"""Streams, events and memory of an accelerator: the little that the link asks of it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.uninterrupted import uninterrupted

log = logging.getLogger(__name__)


class Outcome(Protocol):
    """What a job will return."""

    def result(self) -> Any:
        """Wait for the job; return what it returned, raise what it raised."""


class Lane(ABC):
    """Runs jobs of the host one after the other, beside whoever submits them."""

    @abstractmethod
    def submit(self, run: Callable[[], Any], after: Callable[[], object] | None = None) -> Outcome:
        """Queue a job, to be run once `after` has returned."""

    @abstractmethod
    def close(self) -> None:
        """Let what is queued end, and end the lane."""


class Device(ABC):
    """One accelerator. Streams and events are its own kind of objects, handed back to it only."""

    torch_device: torch.device
    shared = False
    """Whether its memory is the host's, so that both take from the same bytes."""

    @abstractmethod
    def stream(self, what: str) -> Any:
        """Make a stream."""

    @abstractmethod
    def current_stream(self) -> Any:
        """Return the stream on which the calling thread computes."""

    @abstractmethod
    def record(self, stream: Any) -> Any:
        """Return an event that has happened once all that the stream was given has run."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Let what the stream is given from now on wait for an event."""

    @abstractmethod
    def block(self, event: Any) -> None:
        """Wait until an event has happened."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory (uint8) for the compute stream of the calling thread."""

    @abstractmethod
    def staging(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory (uint8) that the device can read and write by itself."""

    @abstractmethod
    def copy(
        self,
        target: torch.Tensor,
        at: int,
        source: torch.Tensor,
        source_at: int,
        nbytes: int,
        stream: Any,
    ) -> None:
        """Copy bytes between a dense tensor of the device and host memory, on a stream.

        Args:
            target: One dimension, any type.
            at: Its first byte.
            source: One dimension, any type.
            source_at: Its first byte.
            nbytes: How many.
            stream: Where to.
        """

    @abstractmethod
    def lane(self, what: str) -> Lane:
        """Make a lane."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the memory that the device has left, None where there is no telling."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the host memory that the device can read; the lanes have ended."""


class _Thread(Lane):
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"megatrain-{name}")

    def submit(self, run: Callable[[], Any], after: Callable[[], object] | None = None) -> Outcome:
        def job() -> Any:
            if after is not None:
                after()
            with torch.no_grad():
                return run()

        with uninterrupted():
            return self._pool.submit(job)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def is_integrated(device: torch.device) -> bool:
    """Return whether a device has no memory of its own, by what torch says of it."""
    module = torch.get_device_module(device)
    return bool(getattr(module.get_device_properties(device), "is_integrated", False))


class TorchDevice(Device):
    """An accelerator that torch knows: CUDA, ROCm, XPU.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.shared = is_integrated(device)
        self._locked: list[Frame] = []
        self._pageable = False

    def stream(self, what: str) -> torch.Stream:
        """Make a stream that does not wait for the default one."""
        del what
        return torch.Stream(device=self.torch_device)

    def current_stream(self) -> torch.Stream:
        """Return the stream that torch gives kernels of this thread to."""
        return torch.accelerator.current_stream(self.torch_device)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Record an event without timing."""
        return stream.record_event(torch.Event(self.torch_device))

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Let a stream wait; the host goes on."""
        stream.wait_event(event)

    def block(self, event: torch.Event) -> None:
        """Let the host wait."""
        event.synchronize()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate from torch's caching allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def staging(self, nbytes: int) -> torch.Tensor:
        """Map huge pages and lock them, so that no byte is rounded up to a power of two.

        Where locking is refused the buffer stays as it is: copies are slower, and as right.
        """
        if self.torch_device.type != "cuda":
            return self._pinned_by_torch(nbytes)
        frame = Frame(nbytes)
        frame.tensor.fill_(0)  # pages that were never touched have no place to be locked in
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self.torch_device):
            error = cudart.cudaHostRegister(frame.tensor.data_ptr(), frame.nbytes, 0)
        if int(error) == 0:
            self._locked.append(frame)
        else:
            self._tell(f"cudaHostRegister of {nbytes} bytes failed with error {int(error)}")
        return frame.tensor

    def _pinned_by_torch(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self._tell(str(error))
            return Frame(nbytes).tensor

    def _tell(self, why: str) -> None:
        if not self._pageable:
            self._pageable = True
            log.warning(
                "host memory cannot be page-locked (%s): copies to and from %s will not overlap "
                "with compute. Raise the limit of locked memory (`ulimit -l`) and begin again.",
                why,
                self.torch_device,
            )

    def copy(
        self,
        target: torch.Tensor,
        at: int,
        source: torch.Tensor,
        source_at: int,
        nbytes: int,
        stream: torch.Stream,
    ) -> None:
        """Queue one copy; the host goes on where its memory is page-locked."""
        with stream:
            part = source.view(torch.uint8)[source_at : source_at + nbytes]
            target.view(torch.uint8)[at : at + nbytes].copy_(part, non_blocking=True)

    def lane(self, what: str) -> Lane:
        """Start a thread."""
        return _Thread(what)

    def free_bytes(self) -> int:
        """Ask the driver, and torch: what it keeps for later is free as well."""
        module, device = torch.get_device_module(self.torch_device), self.torch_device
        kept = module.memory_reserved(device) - module.memory_allocated(device)
        return module.mem_get_info(device)[0] + kept

    def close(self) -> None:
        """Unlock what was locked."""
        for frame in self._locked:
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(frame.tensor.data_ptr())
        self._locked.clear()
