from __future__ import annotations

import pytest
import torch

from mt_lightning.tiers.delayed import DelayedLink
from mt_lightning.tiers.link import DeviceFrame, HostLink, Upload


def host_bytes(value: float, num: int = 16) -> torch.Tensor:
    return torch.full((num,), value).view(torch.uint8)


def begin(link: DelayedLink, value: float = 2.0) -> Upload:
    host = host_bytes(value)
    return link.upload(host, link.frame(host.numel()))


def test_host_link_moves_nothing() -> None:
    link = HostLink()
    assert link.unified
    assert link.free_bytes() is None
    with pytest.raises(AssertionError, match="no device"):
        link.frame(16)
    link.close()


def test_a_frame_tells_whether_somebody_looks_at_it() -> None:
    frame = DeviceFrame(torch.empty(64, dtype=torch.uint8))
    assert not frame.in_use()
    view = frame.tensor[8:].view(torch.float32)
    assert frame.in_use()
    del view
    assert not frame.in_use()


def test_upload_without_wait_reads_nan() -> None:
    link = DelayedLink()
    upload = begin(link)
    assert upload.frame.tensor.view(torch.float32).isnan().all()
    assert upload.frame.tensor.view(torch.bfloat16).isnan().all()
    assert torch.equal(link.wait(upload), host_bytes(2.0))
    assert upload.host is None
    link.close()


def test_host_overwritten_before_wait_is_a_wrong_bit() -> None:
    link = DelayedLink()
    host = host_bytes(2.0)
    upload = link.upload(host, link.frame(host.numel()))
    host.zero_()
    assert not torch.equal(link.wait(upload), host_bytes(2.0))


def test_host_may_change_once_it_was_taken() -> None:
    link = DelayedLink()
    host = host_bytes(2.0)
    upload = link.upload(host, link.frame(host.numel()))
    link.taken(upload)
    host.zero_()
    assert torch.equal(link.wait(upload), host_bytes(2.0))


def test_an_upload_waits_for_what_makes_its_bytes() -> None:
    link = DelayedLink()
    host = host_bytes(1.0)
    upload = link.upload(host, link.frame(host.numel()), lambda: host.copy_(host_bytes(2.0)))
    for value in range(8):
        begin(link, float(value))
    assert upload.host is not None
    assert torch.equal(link.wait(upload), host_bytes(2.0))


def test_retired_frame_reads_nan_through_an_old_view() -> None:
    link = DelayedLink()
    upload = begin(link)
    view = link.wait(upload).view(torch.float32)[3:]
    link.retire(upload.frame)
    assert view.isnan().all()


def test_retire_without_wait() -> None:
    link = DelayedLink()
    upload = begin(link)
    link.retire(upload.frame)
    assert upload.frame.tensor.view(torch.float32).isnan().all()
    assert upload.host is None


@pytest.mark.parametrize("seed", range(5))
def test_order_is_random_but_results_are_not(seed: int) -> None:
    link = DelayedLink(seed)
    uploads = [begin(link, float(i)) for i in range(10)]
    downloads = [link.download(torch.full((4,), float(i)), torch.empty(4)) for i in range(10)]
    assert (
        sum(upload.host is not None for upload in uploads)
        + sum(download.device is not None for download in downloads)
        == 3
    )
    for i in reversed(range(10)):
        assert torch.equal(link.wait(uploads[i]), host_bytes(float(i)))
        assert torch.equal(link.done(downloads[i]), torch.full((4,), float(i)))


def test_orders_differ_between_seeds() -> None:
    def order(seed: int) -> tuple[bool, ...]:
        link = DelayedLink(seed)
        uploads = [begin(link) for _ in range(12)]
        return tuple(upload.host is None for upload in uploads)

    assert len({order(seed) for seed in range(10)}) > 1


def test_downloaded_gradient_is_poisoned_once_copied() -> None:
    link = DelayedLink()
    grad = torch.ones(4)
    download = link.download(grad, torch.empty(4))
    assert torch.equal(grad, torch.ones(4))
    assert download.host.isnan().all()
    assert torch.equal(link.done(download), torch.ones(4))
    assert grad.isnan().all()
    assert torch.equal(link.done(download), torch.ones(4))


def test_downloads_into_one_tensor_keep_their_order() -> None:
    link = DelayedLink()
    first = link.download(torch.full((4,), 1e8), torch.empty(4))
    others = [link.download(torch.full((4,), x), first.host, add=True) for x in (1.0, -1e8)]
    assert torch.equal(link.done(others[1]), torch.zeros(4)), "1e8 + 1 is 1e8 in fp32"
    assert torch.equal(link.done(first), torch.zeros(4))


def test_gradient_that_shares_its_storage_is_poisoned_later() -> None:
    link = DelayedLink()
    base = torch.ones(8)
    grad = base.detach()
    copied = link.done(link.download(grad, torch.empty(8)))
    assert torch.equal(base, torch.ones(8))
    del base
    link.done(link.download(torch.zeros(1), torch.empty(1)))
    assert grad.isnan().all()
    assert torch.equal(copied, torch.ones(8))


def test_gradient_that_is_a_view_leaves_its_base_alone() -> None:
    link = DelayedLink()
    base = torch.ones(8)
    link.done(link.download(base[:4], torch.empty(4)))
    assert torch.equal(base, torch.ones(8))
    assert not link._copied


def test_download_of_every_layout() -> None:
    link = DelayedLink()
    for tensor in (torch.ones(()), torch.ones(2, 3).t(), torch.empty(0), torch.arange(3)):
        expected = tensor.clone()
        assert torch.equal(link.done(link.download(tensor, torch.empty_like(tensor))), expected)
