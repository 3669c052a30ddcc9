"""The autograd graph of one execution of a unit, kept until backward or dropped before.

[Note: a kept graph is a cache]
The unit runs under torch's checkpoint as ever. Inside of it lie hooks of ours that keep what
autograd saves instead of handing it on. As long as it is there, backward takes it from here and
nothing runs again. A graph can be dropped at any moment before that: what it saved is then handed
on to checkpoint, in the order in which it was saved, and backward runs the unit again. So a graph
is kept or not as memory allows, and no bit depends on it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from mt_lightning.engine.graphs.saved import Saved, Value, Weight, num_bytes
from mt_lightning.engine.units import Unit
from mt_lightning.pages.table import Page

if TYPE_CHECKING:
    from mt_lightning.engine.graphs.keeper import Keeper

OUTSIDE = -1
"""The graph task of code that no backward runs."""

_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
IS_AVAILABLE = _top_hooks is not None
"""Whether this torch tells which hooks lie below ours; releases before 2.8 may not."""


class Binding(Protocol):
    """What a graph asks of the engine."""

    def enter(self, unit: Unit, *, backward: bool, start: int = 0, again: bool = False) -> None:
        """Bind the unit's pages; in backward, `start` numbers the execution's first node.

        `again` says that this backward has entered the execution before.
        """

    def leave(self, unit: Unit, *, backward: bool) -> None:
        """Release them; after a replay they may stay bound until the next unit enters."""

    def plane(self, index: int) -> torch.Tensor | None:
        """Return the bytes that a page is bound to, None where it is not bound."""
        ...


class Lease:
    """Lives as long as anything that was saved with it."""

    __slots__ = ("__weakref__", "_on_end")

    def __init__(self, on_end: Callable[[], None] | None = None) -> None:
        self._on_end = on_end

    def __del__(self) -> None:
        """Tell that the last of it is gone; this may be on any thread."""
        if self._on_end is not None:
            self._on_end()


class Graph:
    """What one execution of a unit saved for backward.

    Args:
        keeper: Decides what becomes of it.
        host: The engine.
        unit: The unit.
        given: What the unit received; it is kept for other reasons and not counted.
        number: Its number among all graphs.

    Attributes:
        unit: The unit.
        number: Its number.
        nbytes: Bytes that are held because the graph is.
        dropped: Whether backward runs the unit again.
    """

    def __init__(
        self, keeper: Keeper, host: Binding, unit: Unit, given: Iterable[Any], number: int
    ) -> None:
        self._keeper = keeper
        self._host = host
        self.unit = unit
        self.number = number
        self.nbytes = 0
        self.dropped = False
        self._seen: set[int] = set()
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                num_bytes(tensor, self._seen)
        self._values: weakref.ref[Lease] | None = None
        self._weights: weakref.ref[Lease] | None = None
        self._leases: tuple[Lease, Lease] | None = None
        self._pages: dict[int, Page] = {}
        self._order: list[weakref.ref[Saved]] = []
        self._task: int | None = None
        self._num_released = -1
        self._start = 0
        self._hooks: saved_tensors_hooks | None = None
        self._pack_again: Callable[[torch.Tensor], Any] | None = None
        self._unpack_again: Callable[[Any], torch.Tensor] | None = None

    # -- forward ----------------------------------------------------------------------------------

    def open(self, start: int) -> None:
        """Begin to keep what is saved; the unit is bound and checkpoint's hooks are in place.

        Args:
            start: Number of the first autograd node that the execution makes.
        """
        assert _top_hooks is not None
        hooks = _top_hooks(True)
        assert hooks is not None
        self._pack_again, self._unpack_again = hooks
        self._start = start
        for index in self.unit.pages:
            plane = self._host.plane(index)
            assert plane is not None
            num_bytes(plane, self._seen)
            self._pages[plane.untyped_storage()._cdata] = self._keeper.table[index]
        for module in self.unit.module.modules():
            for buffer in module._buffers.values():
                if buffer is not None:
                    num_bytes(buffer, self._seen)
        values, weights = Lease(partial(self._keeper.ended.append, self.number)), Lease()
        self._values, self._weights = weakref.ref(values), weakref.ref(weights)
        self._leases = values, weights
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def close(self) -> None:
        """End it, before the unit is let go."""
        assert self._hooks is not None
        self._hooks.__exit__()
        # From here on the graph lives by what autograd holds of it.
        self._hooks = self._leases = None
        self._seen.clear()
        self._pages.clear()

    def settle(self, result: Any) -> None:
        """Let the keeper decide, and see to it that backward binds the unit first of all."""
        self._keeper.settle(self)
        if self.dropped:
            return
        me = weakref.ref(self)

        def arrive(_: Any) -> None:
            graph = me()
            if graph is not None and not graph.dropped:
                graph._arrive()

        nodes = {leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        for node in nodes:
            if node is not None and node._sequence_nr() >= self._start:
                node.register_prehook(arrive)

    def _pack(self, tensor: torch.Tensor) -> Any:
        assert self._leases is not None
        nbytes, page = num_bytes(tensor, self._seen), None
        if not nbytes and tensor.layout is torch.strided:
            page = self._pages.get(tensor.untyped_storage()._cdata)
        saved: Saved
        if page is not None:
            saved = Weight(tensor, page, self._keeper.param_at(page, tensor), self._leases[1])
        else:
            saved = Value(tensor, self._leases[0])
            self.nbytes += nbytes
        self._order.append(weakref.ref(saved))
        return saved

    # -- backward ---------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether anything is held."""
        return not self.dropped and (_lives(self._values) or _lives(self._weights))

    def awaits(self, page: Page) -> bool:
        """Return whether backward may still ask for a weight of `page`."""
        return page.index in self.unit.pages and not self.dropped and _lives(self._weights)

    @property
    def arrived(self) -> bool:
        """Whether the backward that runs now has come to the unit already."""
        return self._task is not None and self._task == torch._C._current_graph_task_id()

    def drop(self) -> None:
        """Let go of everything; backward will run the unit again."""
        assert not self.dropped
        assert self._pack_again is not None
        self.dropped = True
        for reference in self._order:
            saved = reference()
            if saved is None:
                # What has died since keeps its place in the order.
                self._pack_again(_NOTHING)
            else:
                saved.holder = self._pack_again(saved.forget())
        self._order.clear()

    def _unpack(self, saved: Value | Weight) -> torch.Tensor:
        if not self.dropped:
            self._arrive()  # where memory is short, this may drop it
        if self.dropped:
            assert self._unpack_again is not None
            return self._unpack_again(saved.holder)
        if isinstance(saved, Value):
            return saved.get(self.unit.name)
        if torch._C._current_graph_task_id() != OUTSIDE:
            plane = self._host.plane(saved.page.index)
            assert plane is not None
            return saved.get(self.unit.name, plane)
        self._host.enter(self.unit, backward=False, again=True)
        try:
            plane = self._host.plane(saved.page.index)
            assert plane is not None
            return saved.get(self.unit.name, plane).clone()
        finally:
            self._host.leave(self.unit, backward=False)

    def _arrive(self) -> None:
        """Bind the unit, for what is unpacked and for checkpoints inside of it."""
        task = torch._C._current_graph_task_id()
        if task == OUTSIDE:
            return
        host, again = self._host, task == self._task
        if again and self._keeper.num_released == self._num_released:
            return
        self._task = task
        host.enter(self.unit, backward=True, start=self._start, again=again)
        host.leave(self.unit, backward=True)
        self._num_released = self._keeper.num_released


def _lives(reference: weakref.ref[Lease] | None) -> bool:
    return reference is not None and reference() is not None


class Places:
    """Finds the parameter that a view of a page belongs to."""

    def __init__(self, offsets: list[int], params: list[torch.nn.Parameter]) -> None:
        order = sorted(range(len(params)), key=offsets.__getitem__)
        self._offsets = [offsets[i] for i in order]
        self._params = [params[i] for i in order]

    def at(self, offset: int) -> torch.nn.Parameter:
        """Return the parameter at a byte of the page."""
        return self._params[max(0, bisect_right(self._offsets, offset) - 1)]


_NOTHING = torch.empty(0)
