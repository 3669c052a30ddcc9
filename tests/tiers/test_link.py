from __future__ import annotations

import pytest
import torch

from mt_lightning.tiers.delayed import DelayedLink
from mt_lightning.tiers.link import HostLink


def host_bytes(value: float, num: int = 16) -> torch.Tensor:
    return torch.full((num,), value).view(torch.uint8)


def test_host_link_returns_the_same_tensors() -> None:
    link = HostLink()
    host = host_bytes(1.0)
    device = link.wait(link.upload(host))
    assert device is host
    link.retire(device)
    assert torch.equal(host, host_bytes(1.0))
    grad = torch.ones(3)
    assert link.done(link.download(grad)) is grad
    link.close()


def test_upload_without_wait_reads_nan() -> None:
    link = DelayedLink()
    upload = link.upload(host_bytes(2.0))
    assert upload.device.view(torch.float32).isnan().all()
    assert upload.device.view(torch.bfloat16).isnan().all()
    assert torch.equal(link.wait(upload), host_bytes(2.0))
    assert upload.host is None
    link.close()


def test_host_overwritten_before_wait_is_a_wrong_bit() -> None:
    link = DelayedLink()
    host = host_bytes(2.0)
    upload = link.upload(host)
    host.zero_()
    assert not torch.equal(link.wait(upload), host_bytes(2.0))


def test_retired_frame_reads_nan_through_an_old_view() -> None:
    link = DelayedLink()
    device = link.wait(link.upload(host_bytes(2.0)))
    view = device.view(torch.float32)[3:]
    link.retire(device)
    assert view.isnan().all()
    with pytest.raises(AssertionError):
        link.retire(device)


def test_retire_without_wait() -> None:
    link = DelayedLink()
    upload = link.upload(host_bytes(2.0))
    link.retire(upload.device)
    assert upload.device.view(torch.float32).isnan().all()
    assert upload.host is None


@pytest.mark.parametrize("seed", range(5))
def test_order_is_random_but_results_are_not(seed: int) -> None:
    link = DelayedLink(seed)
    uploads = [link.upload(host_bytes(float(i))) for i in range(10)]
    downloads = [link.download(torch.full((4,), float(i))) for i in range(10)]
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
        uploads = [link.upload(host_bytes(1.0)) for _ in range(12)]
        return tuple(upload.host is None for upload in uploads)

    assert len({order(seed) for seed in range(10)}) > 1


def test_downloaded_gradient_is_poisoned_once_copied() -> None:
    link = DelayedLink()
    grad = torch.ones(4)
    download = link.download(grad)
    assert torch.equal(grad, torch.ones(4))
    assert torch.equal(link.done(download), torch.ones(4))
    assert grad.isnan().all()
    assert torch.equal(link.done(download), torch.ones(4))


def test_gradient_that_shares_its_storage_is_poisoned_later() -> None:
    link = DelayedLink()
    base = torch.ones(8)
    grad = base.detach()
    copied = link.done(link.download(grad))
    assert torch.equal(base, torch.ones(8))
    del base
    link.done(link.download(torch.zeros(1)))
    assert grad.isnan().all()
    assert torch.equal(copied, torch.ones(8))


def test_gradient_that_is_a_view_leaves_its_base_alone() -> None:
    link = DelayedLink()
    base = torch.ones(8)
    link.done(link.download(base[:4]))
    assert torch.equal(base, torch.ones(8))
    assert not link._copied


def test_download_of_every_layout() -> None:
    link = DelayedLink()
    for tensor in (torch.ones(()), torch.ones(2, 3).t(), torch.empty(0), torch.arange(3)):
        expected = tensor.clone()
        assert torch.equal(link.done(link.download(tensor)), expected)
