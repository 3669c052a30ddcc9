"""Inputs of units on their way from a device that is late, and back."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from mt_lightning.engine.inputs.item import Item
from mt_lightning.engine.inputs.ram_mover import RamMover
from mt_lightning.pager.budget import Budget
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pager.stats import Stats
from mt_lightning.tiers.arena import Arena
from mt_lightning.tiers.doubles import MemoryStore
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.link import Link

from .runs import link_of

NUM_SEEDS = 12


class Rig:
    """A mover, and the budgets of both sides."""

    def __init__(self, link: Link, limit_bytes: int = 1 << 20) -> None:
        store, arena, stats = MemoryStore(), Arena(), Stats()
        self.io = IOQueue(store, 1)
        self.host, self.there = Budget(limit_bytes), Budget(limit_bytes)
        pool = WeightPool(arena, self.host, store, self.io, stats)
        self.mover = RamMover(link, pool, arena, limit_bytes, stats)

    def item(self, tensor: torch.Tensor) -> Item:
        room = self.there.reserve(tensor.nbytes, "unit inputs")
        storage = tensor.untyped_storage()._cdata
        return Item(weakref.ref(tensor), id(tensor), tensor.nbytes, storage, leaves=True, room=room)

    def close(self) -> None:
        self.mover.close()
        self.io.close()


def send_and_bring(seed: int) -> None:
    torch.manual_seed(seed)
    rig = Rig(link_of("accelerator", seed))
    tensors = [torch.randn(40, 70).t() if i % 2 else torch.randn(2000) for i in range(4)]
    expected = [tensor.clone() for tensor in tensors]
    items = [rig.item(tensor) for tensor in tensors]
    for item in items:
        rig.mover.write(item)
    assert all(tensor.numel() == 0 for tensor in tensors)
    for item in reversed(items):
        rig.mover.begin_read(item, rig.there.reserve(item.away_bytes, "input frames"))
    for item, tensor, value in zip(items, tensors, expected, strict=True):
        rig.mover.end_read(item)
        assert torch.equal(tensor, value)
        rig.mover.free_frame(item)
    while rig.mover.settle_oldest():
        pass
    rig.mover.collect()
    assert rig.host.used_bytes == rig.there.used_bytes == 0
    rig.close()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_what_comes_back_is_what_was_sent(seed: int) -> None:
    send_and_bring(seed)


def test_bytes_are_counted_until_they_have_left() -> None:
    rig = Rig(link_of("accelerator", 0))
    tensor = torch.randn(2048)
    item = rig.item(tensor)
    rig.mover.write(item)
    assert rig.there.used_bytes == 8192, "the copy may not have run"
    assert rig.mover.settle_oldest()
    assert rig.there.used_bytes == 0
    assert rig.host.used_bytes == 8192
    rig.mover.forget_copy(item)
    assert rig.host.used_bytes == 0
    rig.close()


def test_a_host_without_room_takes_nothing() -> None:
    rig = Rig(link_of("accelerator", 0), limit_bytes=1 << 14)
    assert rig.mover.takes(4096)
    assert not rig.mover.takes(1 << 14)
    rig.close()


def test_a_copy_that_has_not_arrived_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(self: Any, item: Any, room: Any) -> None:
        frame = self._link.frame(item.copy.frame.nbytes)
        item.frame, item.room = frame, room
        item.read = self._link.upload(item.copy.frame.tensor.clone(), frame)

    monkeypatch.setattr(RamMover, "begin_read", too_early)

    def is_caught(seed: int) -> bool:
        try:
            send_and_bring(seed)
        except AssertionError:
            return True
        return False

    assert any(is_caught(seed) for seed in range(NUM_SEEDS))
