"""The link's own code, on a device whose streams are late and out of order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mt_lightning.tiers.accelerator import AcceleratorLink
from mt_lightning.tiers.link import DeviceFrame

from .fake import FakeDevice, FakeEvent, FakeStream, FreedError

NUM_FRAMES = 2
NBYTES = 160
PIECE_BYTES = 64
"""Three pieces for a frame: more than there are staging buffers."""


class Play:
    """Uploads, kernels and downloads in random order, as a model may ask for them."""

    def __init__(self, device: FakeDevice, seed: int) -> None:
        self.device = device
        self.link = AcceleratorLink(device, piece_bytes=PIECE_BYTES)
        self.random = random.Random(seed)
        self.frames: list[DeviceFrame] = [self.link.frame(NBYTES) for _ in range(NUM_FRAMES)]
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.downloads: list[tuple[Any, torch.Tensor]] = []
        self.sums: list[torch.Tensor] = []

    def run(self, num_rounds: int) -> None:
        for number in range(num_rounds):
            self.weights(number)
            for _ in range(self.random.randrange(3)):
                self.gradient()
            if self.downloads and self.random.random() < 0.5:
                self.check(self.downloads.pop(self.random.randrange(len(self.downloads))))
        while self.downloads:
            self.check(self.downloads.pop())
        self.device.synchronize()
        for actual, expected in self.seen:
            assert torch.equal(actual, expected), "compute saw other weights"
        self.link.close()

    def weights(self, number: int) -> None:
        """Bring weights, read them twice, and let go of the frame."""
        frame = self.frames.pop(0)
        host = torch.full((NBYTES,), number % 251, dtype=torch.uint8)
        expected = host.clone()
        upload = self.link.upload(host, frame)
        if self.random.random() < 0.3:
            self.gradient()
        self.link.taken(upload)
        host.fill_(0)  # an update may write to it from here on
        if self.random.random() < 0.9:
            self.link.wait(upload)
            for _ in range(2):
                self.read(frame, expected)
            if self.random.random() < 0.5:
                self.link.mark(frame)
        else:
            self.link.wait(upload)  # a prefetch nobody wanted
        self.link.retire(frame)
        self.frames.append(frame)

    def read(self, frame: DeviceFrame, expected: torch.Tensor) -> None:
        """Launch a kernel that reads a frame."""
        actual = torch.empty(NBYTES, dtype=torch.uint8)
        self.seen.append((actual, expected))
        self.device.launch(lambda: actual.copy_(frame.tensor))

    def gradient(self) -> None:
        """Make a gradient on the device and send it away; some are added to an earlier one."""
        shape = self.random.choice([(), (5,), (7, 9), (0,)])
        grad, values = torch.full(shape, float("nan")), torch.randn(shape)
        self.device.launch(lambda: grad.copy_(values))
        again = [item for item in self.downloads if item[1].shape == shape]
        if again and self.random.random() < 0.4:
            before, expected = self.random.choice(again)
            download = self.link.download(grad, before.host, add=True)
            expected.add_(values)
            self.downloads = [item for item in self.downloads if item[0] is not before]
        else:
            download, expected = self.link.download(grad, torch.empty(shape)), values.clone()
        self.downloads.append((download, expected))

    def check(self, item: tuple[Any, torch.Tensor]) -> None:
        download, expected = item
        assert torch.equal(self.link.done(download), expected), "another gradient arrived"
        assert download.device is None, "the gradient is held for longer than needed"


def play(device: FakeDevice, seed: int, num_rounds: int = 12) -> None:
    torch.manual_seed(seed)
    Play(device, seed).run(num_rounds)


def play_many(num: int = 20) -> None:
    for seed in range(num):
        play(FakeDevice(seed, lazy=True), seed)


def test_every_order_gives_the_same_bytes() -> None:
    play_many(60)


@pytest.mark.slow
def test_a_thousand_orders_give_the_same_bytes() -> None:
    play_many(1000)


# -- planted bugs ---------------------------------------------------------------------------------


class WithoutWait(FakeDevice):
    """One stream never waits."""

    deaf = ""

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if stream.what != self.deaf:
            super().wait(stream, event)


class ComputeDoesNotWait(WithoutWait):
    deaf = "compute"


class UploadDoesNotWait(WithoutWait):
    deaf = "upload"


class DownloadDoesNotWait(WithoutWait):
    deaf = "download"


class HostDoesNotWait(FakeDevice):
    def block(self, event: FakeEvent) -> None:
        del event


class WrongStream(FakeDevice):
    """The last use of a frame is recorded on the stream of the copies."""

    def record(self, stream: FakeStream) -> FakeEvent:
        return super().record(self._streams[1] if stream is self._compute else stream)


class SwappedStreams(FakeDevice):
    """Compute is taken for the stream that downloads."""

    def current_stream(self) -> FakeStream:
        return self._streams[2] if len(self._streams) > 2 else self._compute


PLANTED = [
    ComputeDoesNotWait,
    UploadDoesNotWait,
    DownloadDoesNotWait,
    HostDoesNotWait,
    WrongStream,
    SwappedStreams,
]


@pytest.mark.parametrize("device", PLANTED)
def test_a_wait_that_is_missing_is_noticed(device: type[FakeDevice]) -> None:
    def is_caught(seed: int) -> bool:
        try:
            play(device(seed, lazy=True), seed)
        except AssertionError:
            return True
        return False

    caught = sum(is_caught(seed) for seed in range(20))
    assert caught >= 5, f"noticed in {caught} of 20 orders"


def test_a_frame_that_is_reused_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: AcceleratorLink, frame: DeviceFrame) -> None:
        frame.last_use = FakeEvent(None)

    monkeypatch.setattr(AcceleratorLink, "mark", forget)
    with pytest.raises(AssertionError):
        play_many()


def test_host_bytes_that_change_before_they_were_taken_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AcceleratorLink, "taken", lambda self, upload: None)
    with pytest.raises(AssertionError, match="other weights"):
        play_many()


def test_a_gradient_that_is_freed_before_its_download_is_noticed() -> None:
    device = FakeDevice(3, lazy=True)
    stream = device.stream("download")
    grad, into = torch.ones(4), torch.empty(16, dtype=torch.uint8)
    gate = FakeEvent(stream)
    stream.queue.append(("wait", gate))
    device.copy(into, 0, grad, 0, 16, stream)
    del grad
    gate.happened = True
    with pytest.raises(FreedError):
        device.close()


def test_gradients_are_held_until_they_have_left() -> None:
    device = FakeDevice(0, lazy=True)
    link = AcceleratorLink(device, piece_bytes=PIECE_BYTES)
    grad = torch.ones(100)
    download = link.download(grad, torch.empty(100))
    del grad
    for _ in range(50):
        device.poke()
    assert torch.equal(link.done(download), torch.ones(100))
    assert download.device is None


def test_errors_of_what_comes_before_an_upload_are_raised_to_who_waits() -> None:
    class BrokenError(Exception):
        pass

    def after() -> None:
        raise BrokenError

    link = AcceleratorLink(FakeDevice(), piece_bytes=PIECE_BYTES)
    upload = link.upload(torch.zeros(NBYTES, dtype=torch.uint8), link.frame(NBYTES), after)
    with pytest.raises(BrokenError):
        link.wait(upload)
    other = link.upload(torch.ones(NBYTES, dtype=torch.uint8), link.frame(NBYTES))
    assert torch.equal(link.wait(other), torch.ones(NBYTES, dtype=torch.uint8))


def test_page_locked_bytes_do_not_grow_with_what_is_copied() -> None:
    made = []

    class Counting(FakeDevice):
        def staging(self, nbytes: int) -> torch.Tensor:
            made.append(nbytes)
            return super().staging(nbytes)

    link = AcceleratorLink(Counting(), piece_bytes=PIECE_BYTES)
    for nbytes in (1, 64, 65, 4096):
        host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        assert torch.equal(link.wait(link.upload(host, link.frame(nbytes))), host)
    assert sum(made) == link.staging_bytes == 4 * PIECE_BYTES
    link.close()
