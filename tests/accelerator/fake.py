"""An accelerator made of host memory: streams run late, and out of order where events allow.

[Note: how the fake is late] A stream is a queue of closures. Whenever anybody talks to the device,
a random number of them run, of random streams; the rest runs when somebody blocks on an event, and
only as much of it as has to. Jobs of lanes (threads, on a real machine) are queued in the same way.

[Note: two kinds of compute] With `lazy=True` compute is a queue too, of closures that a test hands
to `launch`. Else it is torch on the CPU, which never is late: then an event that compute waits for
is waited for at once, as what follows runs at once.

[Note: what is caught] A copy that has not run yet leaves NaN in its target, so a wait that is
missing is a wrong bit. A source that has died before its copy ran raises `FreedError`.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from mt_lightning.tiers.device import Device, Lane, Outcome

POISON = 0xFF  # four of them are a NaN in fp32, two a NaN in bf16


class FreedError(AssertionError):
    """Memory was given back while a copy of it had not run."""


class FakeEvent:
    """Has happened once the record of it has run."""

    def __init__(self, stream: FakeStream | None) -> None:
        self.stream = stream
        self.happened = stream is None


class FakeStream:
    """A queue of operations: a closure, an event to wait for, or one to record."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.queue: deque[Callable[[], Any] | tuple[str, FakeEvent]] = deque()


class FakeLane(Lane):
    """Runs jobs when the device feels like it, or somebody waits for one."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.jobs: deque[FakeJob] = deque()
        self.busy = False

    def submit(self, run: Callable[[], Any], after: Callable[[], object] | None = None) -> Outcome:
        job = FakeJob(self, run, after)
        with self.device.lock:
            self.jobs.append(job)
            self.device.poke()
        return job

    def run_next(self) -> None:
        """Run the oldest job; what it waits for has ended."""
        assert not self.busy
        job = self.jobs.popleft()
        self.busy = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                job.value = job.run()
        except BaseException as error:
            job.error = error
        finally:
            self.busy = False
        job.run, job.done = None, True

    def close(self) -> None:
        while self.jobs:
            self.jobs[0].wait_after()
            with self.device.lock:
                self.run_next()


class FakeJob:
    """A job of a lane, and what came of it."""

    def __init__(
        self, lane: FakeLane, run: Callable[[], Any], after: Callable[[], object] | None
    ) -> None:
        self.lane = lane
        self.run: Any = run
        self.after = after
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False

    def wait_after(self) -> None:
        """Wait for what has to come first; not under the lock, somebody may need that for it."""
        if self.after is not None:
            try:
                self.after()
            except BaseException as error:
                self.error, self.run = error, lambda: None
            self.after = None

    def result(self) -> Any:
        while not self.done:
            with self.lane.device.lock:
                first = self.lane.jobs[0] if self.lane.jobs else self
            first.wait_after()
            with self.lane.device.lock:
                if not self.done and self.lane.jobs and self.lane.jobs[0] is first:
                    error = first.error
                    self.lane.run_next()
                    first.error = first.error or error
        if self.error is not None:
            raise self.error
        return self.value


class FakeDevice(Device):
    """A device for `AcceleratorLink`.

    Args:
        seed: Decides what is late.
        lazy: Whether compute is late too; see `launch`.
        memory_bytes: What the device has.
    """

    torch_device = torch.device("cpu")

    def __init__(
        self, seed: int = 0, *, lazy: bool = False, memory_bytes: int | None = None
    ) -> None:
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._eagerness = self._random.uniform(0.1, 0.7)
        self._lazy = lazy
        self._memory_bytes = memory_bytes
        self._compute = FakeStream("compute")
        self._streams = [self._compute]
        self._lanes: list[FakeLane] = []
        self.num_copies = 0
        self.uploaded_bytes = 0
        self.errors: list[BaseException] = []

    # -- the surface ------------------------------------------------------------------------------
    def stream(self, what: str) -> FakeStream:
        self._streams.append(FakeStream(what))
        return self._streams[-1]

    def current_stream(self) -> FakeStream:
        return self._compute

    def record(self, stream: FakeStream) -> FakeEvent:
        with self.lock:
            if self._is_eager(stream):
                return FakeEvent(None)
            event = FakeEvent(stream)
            stream.queue.append(("record", event))
            self.poke()
            return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self.lock:
            if self._is_eager(stream):
                self.block(event)
            else:
                stream.queue.append(("wait", event))
            self.poke()

    def block(self, event: FakeEvent) -> None:
        with self.lock:
            self.poke()
            while not event.happened:
                assert event.stream is not None
                self._step(event.stream)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8).fill_(POISON)

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8).fill_(POISON)

    def copy(
        self,
        target: torch.Tensor,
        at: int,
        source: torch.Tensor,
        source_at: int,
        nbytes: int,
        stream: FakeStream,
    ) -> None:
        to, frm = target.data_ptr() + at, source.data_ptr() + source_at
        alive = weakref.ref(target), weakref.ref(source)

        def run() -> None:
            if any(ref() is None for ref in alive):
                raise FreedError(f"memory of a copy on the {stream.what} stream was given back")
            ctypes.memmove(to, frm, nbytes)
            self.num_copies += 1

        with self.lock:
            if not (self._lazy and stream.what == "upload"):
                # With lazy compute the target may still be read by what was launched before.
                ctypes.memset(to, POISON, nbytes)
            self.uploaded_bytes += nbytes * (stream.what == "upload")
            stream.queue.append(run)
            self.poke()

    def lane(self, what: str) -> FakeLane:
        self._lanes.append(FakeLane(self))
        return self._lanes[-1]

    def free_bytes(self) -> int | None:
        return self._memory_bytes

    def close(self) -> None:
        with self.lock:
            for stream in self._streams:
                while stream.queue:
                    self._step(stream)

    # -- running late -----------------------------------------------------------------------------
    def launch(self, kernel: Callable[[], Any]) -> None:
        """Give compute something to do."""
        assert self._lazy
        with self.lock:
            self._compute.queue.append(kernel)
            self.poke()

    def synchronize(self) -> None:
        """Run everything."""
        for lane in self._lanes:
            lane.close()
        self.close()

    def poke(self) -> None:
        """Run some operations of some streams, and perhaps a job."""
        while self._random.random() < self._eagerness:
            ready = [stream for stream in self._streams if self._can_step(stream)]
            idle = [
                lane
                for lane in self._lanes
                if lane.jobs and not lane.busy and lane.jobs[0].after is None
            ]
            choices: list[FakeStream | FakeLane] = [*ready, *idle]
            if not choices:
                return
            chosen = self._random.choice(choices)
            chosen.run_next() if isinstance(chosen, FakeLane) else self._step(chosen)

    def _is_eager(self, stream: FakeStream) -> bool:
        return stream is self._compute and not self._lazy

    @staticmethod
    def _can_step(stream: FakeStream) -> bool:
        if not stream.queue:
            return False
        head = stream.queue[0]
        return not isinstance(head, tuple) or head[0] == "record" or head[1].happened

    def _step(self, stream: FakeStream) -> None:
        """Run the oldest operation of a stream, and whatever has to come before it."""
        head = stream.queue[0]
        if isinstance(head, tuple):
            kind, event = head
            if kind == "wait":
                while not event.happened:
                    assert event.stream is not None
                    self._step(event.stream)
            else:
                event.happened = True
            stream.queue.popleft()
            return
        stream.queue.popleft()
        head()
