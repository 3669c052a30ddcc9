"""Planes on the device: what stays, what goes, and who has to let go first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_lightning.errors import BudgetError
from mt_lightning.pager.budget import Budget
from mt_lightning.pager.device_pool import DevicePool
from mt_lightning.pager.stats import Stats
from mt_lightning.tiers.delayed import DelayedLink
from mt_lightning.tiers.link import DeviceFrame

NBYTES = 4096


class Host:
    """The pool of the host: every page is there."""

    def __init__(self, num_pages: int) -> None:
        self.entries = [
            SimpleNamespace(
                page=page(i),
                read=None,
                pins=0,
                dirty=False,
                frame=SimpleNamespace(tensor=content(i)),
                wait=lambda: None,
            )
            for i in range(num_pages)
        ]

    def entry(self, page: Any) -> Any:
        return self.entries[page.index]

    def prefetch(self, page: Any) -> Any:
        self.entries[page.index].pins += 1
        return self.entries[page.index]

    def release(self, entry: Any) -> None:
        assert entry.pins > 0
        entry.pins -= 1


def page(index: int) -> Any:
    layout = SimpleNamespace(nbytes=NBYTES, key=f"p{index}")
    return SimpleNamespace(index=index, version=0, layout=layout)


def content(index: int) -> torch.Tensor:
    return torch.full((NBYTES,), index, dtype=torch.uint8)


def make(num_frames: int, num_pages: int = 4) -> tuple[DevicePool, Host]:
    host = Host(num_pages)
    pool: Any = host
    planes = DevicePool(DelayedLink(1), pool, Budget(num_frames * NBYTES), Stats(), 2 * NBYTES)
    return planes, host


def use(planes: DevicePool, host: Host, index: int) -> torch.Tensor:
    source = host.entries[index]
    planes.bring(source.page, source)
    plane = planes.plane(source.page)
    assert torch.equal(plane, source.frame.tensor)
    planes.release(source.page)
    return plane


def test_what_has_not_changed_is_not_brought_again() -> None:
    planes, host = make(2)
    for index in (0, 1, 0, 1):
        use(planes, host, index)
    assert planes._stats.bytes_uploaded == 2 * NBYTES
    assert not any(entry.pins for entry in host.entries)


def test_a_page_that_changes_is_brought_anew() -> None:
    planes, host = make(2)
    use(planes, host, 0)
    source = host.entries[0]
    planes.changes(source.page)
    source.frame.tensor.fill_(9)
    source.page.version += 1
    use(planes, host, 0)
    source.page.version += 1  # and where nobody told
    source.frame.tensor.fill_(10)
    use(planes, host, 0)
    assert planes._stats.bytes_uploaded == 3 * NBYTES


def test_a_host_frame_may_change_once_its_page_was_told_to() -> None:
    planes, host = make(2)
    source = host.entries[0]
    assert planes.prefetch(source.page)
    assert source.pins == 1
    planes.changes(source.page)
    assert not source.pins
    source.frame.tensor.fill_(9)
    use(planes, host, 0)


def test_a_frame_that_somebody_looks_at_is_not_given_to_another_page() -> None:
    planes, host = make(2)
    view = use(planes, host, 0).view(torch.float32)
    use(planes, host, 1)
    use(planes, host, 2)
    assert torch.equal(view.view(torch.uint8), content(0))
    planes.bring(host.entries[2].page, host.entries[2])
    with pytest.raises(BudgetError, match="max_vram_gb"):
        planes.bring(host.entries[3].page, host.entries[3])
    del view
    planes.bring(host.entries[3].page, host.entries[3])


def test_that_it_would_be_given_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceFrame, "in_use", lambda self: False)
    planes, host = make(1)
    view = use(planes, host, 0).view(torch.float32)
    use(planes, host, 1)
    assert not torch.equal(view.view(torch.uint8), content(0))


def test_host_memory_comes_back_from_copies_under_way() -> None:
    planes, host = make(3)
    assert planes.prefetch(host.entries[0].page)
    assert host.entries[0].pins == 1
    assert planes.relieve()
    assert not host.entries[0].pins
    assert not planes.relieve()
    use(planes, host, 0)


def test_what_is_brought_ahead_takes_nothing_that_is_needed_sooner() -> None:
    planes, host = make(2)
    order = {0: 1.0, 1: 2.0, 2: 3.0, 3: 0.5}
    planes.next_use = order.__getitem__
    use(planes, host, 0)
    use(planes, host, 1)
    assert not planes.prefetch(host.entries[2].page)
    assert planes.prefetch(host.entries[3].page)
    assert planes.holds(host.entries[0].page)
    assert not planes.holds(host.entries[1].page)


def test_room_for_graphs_is_made_by_dropping_planes() -> None:
    planes, host = make(3)
    for index in range(3):
        use(planes, host, index)
    assert planes.can_reserve(2 * NBYTES)
    reservation = planes.reserve(2 * NBYTES, "graphs", "a graph")
    assert not planes.can_reserve(2 * NBYTES)
    given = [reservation]

    def give_back() -> bool:
        if not given:
            return False
        given.pop().free()
        return True

    planes.give_back = give_back
    planes.reserve(3 * NBYTES, "gradients", "gradients")
    assert not given


def test_writing_to_what_is_kept_comes_home_and_goes_back() -> None:
    planes, host = make(2)
    source = host.entries[0]
    source.pins += 1
    plane = planes.keep(source.page, source)
    plane.fill_(7)  # user code
    planes.changes(source.page)
    assert torch.equal(source.frame.tensor, content(7))
    source.frame.tensor.add_(1)  # the update
    planes.changed(source.page)
    assert torch.equal(plane, content(8))
    planes.reset()
    assert planes.holds(source.page)
    planes.clear()
    assert planes.budget.used_bytes == 0
