"""The inputs of all units that backward will need: counted, and moved away and back.

[Note: the order of need]
Backward runs executions again in the reverse of their order. So what was received first is needed
last, and goes first: to disk, or to RAM where a device computes. What is read ahead belongs to the
executions before the one that runs.

[Note: what is at work is not counted twice]
An input that does not fit beside the others is not counted while its unit runs: the activations of
the unit at work are not either. It goes to disk as soon as nobody but a checkpoint holds it.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import (
    _top_saved_tensors_default_hooks,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch.utils._pytree import tree_leaves

from mt_lightning.engine.inputs.item import Hold, Item, Kept
from mt_lightning.engine.inputs.mover import Memory, Mover
from mt_lightning.engine.inputs.tensors import can_leave, is_alone, is_parameter, num_bytes
from mt_lightning.errors import BudgetError, StepError
from mt_lightning.pager.budget import Budget, Reservation
from mt_lightning.pager.stats import Stats

log = logging.getLogger(__name__)

_TOLD_SHARE = 50
"""What lies above the budget is told where it is more than a part in this many of it."""
_SLACK = 8
"""Executions that have ended and are still listed; beyond, they are at most as many as others."""
_PURPOSES = ("unit inputs", "input frames")


class InputTier:
    """Follows the inputs of executions; called by the thread that trains.

    Args:
        pool: Gives memory.
        budget: Counts it.
        mover: Moves bytes.
        stats: Counters.
        device: Where units compute; what lies elsewhere is not counted.
        limit_bytes: The share of the budget that inputs may take.
        read_ahead: How many executions are read ahead of the one that runs.
    """

    def __init__(
        self,
        pool: Memory,
        budget: Budget,
        mover: Mover,
        stats: Stats,
        device: torch.device,
        limit_bytes: int,
        read_ahead: int,
    ) -> None:
        self._pool = pool
        self._budget = budget
        self._mover = mover
        self._stats = stats
        self._device = device
        self._share_bytes = limit_bytes
        self._read_ahead = read_ahead
        self._items: dict[int, Item] = {}
        self._storages: dict[int, int] = {}
        """The tensor that counts each storage: its key, by the storage's."""
        self._in_ram: dict[int, Item] = {}
        """What can go to disk, in the order it goes."""
        self._above: dict[int, Item] = {}
        """What is in RAM and has found no room."""
        self._holds: dict[int, list[Hold]] = {}
        self._alive: dict[int, weakref.ref[Kept]] = {}
        self._order: list[int] = []
        self._num_kept = 0
        self.drop_graph: Callable[[], bool] = lambda: False
        """Lets go of the graph of a unit that backward needs last; False where none is kept."""
        self._ended: deque[int] = deque()
        self._dead: deque[int] = deque()
        self._most_bytes = (0, 0)
        """In this step and in the last one."""
        self._needed: set[int] = set()
        self._reserving = self._closed = self._told = False

    @property
    def expected_bytes(self) -> int:
        """How many bytes of inputs the last step held in RAM at once, or this one so far."""
        return max(self._most_bytes)

    @property
    def away_room_bytes(self) -> int:
        """How many bytes of inputs are expected to find room elsewhere."""
        return self._mover.room_bytes()

    # -- executions -------------------------------------------------------------------------------

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept:
        """Count what an execution receives, for as long as the returned object lives.

        Args:
            args: What it receives by position.
            kwargs: And by name.

        Raises:
            BudgetError: What must go to disk has no room under `max_disk_gb`.
            StorageError: It could not be written.
        """
        self.sweep()
        self._clear_above()
        kept, holds = Kept(self._num_kept), []
        # Then a hook decides what becomes of `args`; the checkpoint does not hold them.
        hooked = _top_saved_tensors_default_hooks(True) is not None
        self._num_kept += 1
        saved, named, nested = Counter[int](), Counter[int](), Counter[int]()
        tensors: dict[int, torch.Tensor] = {}
        for values, counter in ((args, saved), (kwargs.values(), named)):
            for value in values:
                if isinstance(value, torch.Tensor):
                    tensors[id(value)] = value
                    counter[id(value)] += not (hooked and counter is saved)
                    continue
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        tensors[id(leaf)] = leaf
                        nested[id(leaf)] += 1
        for key, tensor in tensors.items():
            if not is_parameter(tensor):
                hold = Hold(self._item(tensor), saved[key], named[key], nested[key])
                hold.take()
                holds.append(hold)
        ended = self._ended
        number = kept.number
        self._alive[number] = weakref.ref(kept, lambda _: ended.append(number))
        self._holds[number] = holds
        self._order.append(number)
        return kept

    def bring(self, kept: Kept) -> None:
        """Have all inputs of an execution in RAM, and begin to read those that come next.

        Raises:
            StorageError: They could not be read.
            CorruptPageError: They are not what was written.
        """
        self.sweep()
        if self._closed:
            raise StepError(
                "backward came after training had ended: the inputs of units are gone. Call "
                "backward in the step that made the loss."
            )
        mine = [hold.item for hold in self._holds[kept.number]]
        away = [item for item in mine if item.away]
        self._needed = {item.key for item in mine}
        try:
            for item in away:
                if item.read is None:
                    room = self._reserve(item.away_bytes, "input frames")
                    self._mover.begin_read(item, room)
            for item in away:
                self._mover.end_read(item)
                self._found(item)
        finally:
            self._needed = set()
        self._begin_reads(kept.number)

    def _begin_reads(self, number: int) -> None:
        """Read ahead, nearest first, as long as nothing that is in use makes room."""
        position = bisect_left(self._order, number)
        num_ahead = 0
        while position and num_ahead < self._read_ahead:
            position -= 1
            holds = self._holds.get(self._order[position])
            if holds is None:
                continue
            num_ahead += 1
            for item in [hold.item for hold in holds if hold.item.away]:
                if item.read is not None:
                    continue
                nbytes = item.away_bytes
                if self._held_bytes + nbytes > self._limit_bytes:
                    return
                if not self._pool.can_reserve(nbytes):
                    return
                room = self._pool.reserve(nbytes, "input frames", "the inputs of a unit")
                self._mover.begin_read(item, room)

    def sweep(self) -> None:
        """Let go of what no execution and nobody else holds any more."""
        while self._ended or self._dead:
            while self._ended:
                number = self._ended.popleft()
                self._alive.pop(number, None)
                for hold in self._holds.pop(number, ()):
                    hold.drop()
                    if not hold.item.num_holders:
                        self._forget(hold.item)
            while self._dead:
                item = self._items.get(self._dead.popleft())
                if item is not None and item.ref() is None:
                    self._forget(item)
        if len(self._order) > 2 * len(self._holds) + _SLACK:
            self._order = [number for number in self._order if number in self._holds]
        self._mover.collect()
        self._mover.count()

    def end_of_step(self) -> None:
        """Delete files that were of no use in the last step."""
        self.sweep()
        self._mover.end_of_step()
        self._most_bytes = (0, self._most_bytes[0])

    def count(self) -> None:
        """Bring the counters up to date."""
        self._mover.count()

    def relieve(self) -> bool:
        """Give memory back to somebody else; False when nothing can be given.

        Where nothing can go to disk, inputs give way in the count: to fail would not free them.
        """
        self.sweep()
        return self._make_room() or (not self._reserving and self._stop_counting())

    def close(self) -> None:
        """Let go of everything; what is away is lost."""
        self._closed = True
        for item in list(self._items.values()):
            if item.away:
                self._mover.give_up_read(item)
            self._forget(item)
        self._holds.clear()
        self._order.clear()
        self._mover.close()

    def _found(self, item: Item) -> None:
        """Take note of a tensor that is in RAM again."""
        tensor = item.ref()
        assert tensor is not None
        item.storage = tensor.untyped_storage()._cdata
        self._storages[item.storage] = item.key
        self._in_ram[item.key] = item
        if item.room is None:
            self._above[item.key] = item

    def reserve_between(self, nbytes: int) -> Reservation | None:
        """Reserve what steps of a window hold between two units; None where it does not fit."""
        return self._reserve(nbytes, "unit inputs") if nbytes else None

    # -- tensors ----------------------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Item:
        key = id(tensor)
        item = self._items.get(key)
        if item is not None:
            return item
        strided = tensor.layout is torch.strided
        storage = tensor.untyped_storage()._cdata if strided else 0
        counted = self._items.get(self._storages.get(storage, 0))
        here = tensor.device.type == self._device.type
        nbytes = num_bytes(tensor) if here else 0
        if counted is not None and not counted.away:
            nbytes = 0
        dead = self._dead
        item = Item(
            weakref.ref(tensor, lambda _: dead.append(key)),
            key,
            nbytes,
            storage,
            here and can_leave(tensor),
        )
        if nbytes:
            self._stats.inputs_bytes += nbytes
            self._storages[storage] = key
            item.room = self._reserve(nbytes, "unit inputs")
            if item.room is None:
                self._above[key] = item
        self._items[key] = item
        if item.leaves and nbytes:
            self._in_ram[key] = item
        return item

    def _forget(self, item: Item) -> None:
        if self._items.get(item.key) is not item:
            return
        del self._items[item.key]
        self._in_ram.pop(item.key, None)
        self._above.pop(item.key, None)
        self._forget_storage(item)
        if item.read is not None:
            self._mover.give_up_read(item)
        self._mover.free_frame(item)
        self._mover.forget_copy(item)

    def _forget_storage(self, item: Item) -> None:
        if self._storages.get(item.storage) == item.key:
            del self._storages[item.storage]

    # -- room -------------------------------------------------------------------------------------

    @property
    def _limit_bytes(self) -> int:
        return self._share_bytes - self._mover.share_bytes

    @property
    def _held_bytes(self) -> int:
        return sum(self._budget.by_purpose[purpose] for purpose in _PURPOSES)

    def _reserve(self, nbytes: int, purpose: str) -> Reservation | None:
        """Reserve, having moved to disk what backward needs last; None where nothing helps."""
        while True:
            if self._held_bytes + nbytes <= self._limit_bytes:
                self._reserving = True
                try:
                    room = self._pool.reserve(nbytes, purpose, "the inputs of a unit")
                except BudgetError:
                    pass
                else:
                    now, before = self._most_bytes
                    self._most_bytes = (max(now, self._held_bytes), before)
                    return room
                finally:
                    self._reserving = False
            if nbytes > self._limit_bytes or not self._make_room():
                return None

    def _make_room(self) -> bool:
        """Move one tensor to disk; False where none can go."""
        if not self._mover.usable:
            return False
        if self._mover.settle_oldest():
            return True
        while True:
            for item in self._in_ram.values():
                if item.room is None or item.key in self._needed:
                    continue
                if self._mover.takes(item.nbytes) and self._is_alone(item):
                    self._spill(item)
                    return True
            # The graph of a unit that is kept until backward holds what the unit received.
            if not self.drop_graph():
                break
        for item in self._items.values():
            if item.away and item.frame is not None and item.key not in self._needed:
                self._mover.give_up_read(item)
                return True
        return False

    def _stop_counting(self) -> bool:
        """Give up the reservation of a tensor that stays where it is; False where there is none."""
        for item in self._items.values():
            if item.room is not None and item.frame is None:
                item.room.free()
                item.room = None
                self._above[item.key] = item
                return True
        return False

    def _is_alone(self, item: Item) -> bool:
        tensor = item.ref()
        if tensor is None or item.nested or not item.leaves:
            return False
        return is_alone(tensor, 1, item.saved, item.named, item.frame is not None)

    def _spill(self, item: Item) -> None:
        del self._in_ram[item.key]
        self._forget_storage(item)
        self._above.pop(item.key, None)
        try:
            self._mover.write(item)
        finally:
            if not item.away:
                self._in_ram[item.key] = item

    def _clear_above(self) -> None:
        """Move to disk what had found no room while it was in use."""
        for item in list(self._above.values()):
            if item.key in self._above and self._mover.usable and self._is_alone(item):
                self._spill(item)
        stuck = sum(item.nbytes for item in self._above.values())
        if stuck * _TOLD_SHARE < self._budget.limit_bytes or self._told:
            return
        self._told = True
        log.warning(
            "%.1f MiB of the inputs of units lie above %s: they have no room in it, and "
            "cannot go elsewhere because something else holds them (a list of hidden states, a "
            "checkpoint around the unit), or because %s.",
            stuck / 2**20,
            self._mover.setting,
            self._mover.blocks,
        )
