"""Keep graphs of units under the budget: count them, drop them, say how many there are."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from mt_lightning.engine.build import Build
from mt_lightning.engine.graphs.choice import Choice
from mt_lightning.engine.graphs.graph import IS_AVAILABLE, OUTSIDE, Binding, Graph, Places
from mt_lightning.engine.placement import Room
from mt_lightning.engine.units import Unit
from mt_lightning.errors import BudgetError, ConfigError
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.table import Page

log = logging.getLogger(__name__)

GIB = 1 << 30


class Keeper:
    """The graphs that are kept now.

    Args:
        recompute: True: none are kept. False: all of them, or it is an error. "auto": as many as
            find room.
        build: The pages.
        room: Where their memory comes from.
        stats: Counters to keep.

    Attributes:
        table: The pages.
        ended: Numbers of graphs whose values are all gone; written to by any thread.
        num_released: How often pages that backward had bound were let go.
        beside: Bytes of the same room that are needed for something else.
    """

    def __init__(
        self,
        recompute: bool | Literal["auto"],
        build: Build,
        room: Room,
        stats: Stats,
    ) -> None:
        if recompute is False and not IS_AVAILABLE:
            raise ConfigError(
                f"recompute=False needs a newer torch than {torch.__version__}. "
                "Set recompute='auto'."
            )
        self._recompute = recompute if IS_AVAILABLE else True
        self._room = room
        self._stats = stats
        self.table = build.table
        self._places = [
            Places([spec.offset for spec in page.layout.params], build.members[page.index].params)
            for page in build.table
        ]
        self._choice = Choice(room.limit_bytes)
        self._graphs: dict[int, weakref.ref[Graph]] = {}
        """Those that are kept, by number: in the order in which they were made."""
        self._gone: deque[int] = deque()
        self._reservations: dict[int, Reservation] = {}
        self.ended: deque[int] = deque()
        self._next = 0
        self._held_bytes = 0
        self._ran: set[int] = set()
        self._again: set[int] = set()
        self._told = 0
        self.num_released = 0
        self.beside: Callable[[], int] = lambda: 0

    # -- forward ----------------------------------------------------------------------------------

    def begin(
        self, host: Binding, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Graph | None:
        """Return the graph of a unit that begins to run, None where none is to be kept.

        A unit that runs inside a backward runs again for somebody's checkpoint: keeping it would
        only last for a moment.
        """
        if self._recompute is True or torch._C._current_graph_task_id() != OUTSIDE:
            return None
        self.collect()
        self._next += 1
        given = tree_leaves((args, kwargs))
        self._ran.add(unit.index)
        if self._recompute == "auto":
            size = sum(item.numel() for item in given if isinstance(item, torch.Tensor))
            if not self._choice.wants(unit.index, size):
                self._again.add(unit.index)
                return None
        return Graph(self, host, unit, given, self._next)

    def param_at(self, page: Page, tensor: torch.Tensor) -> torch.nn.Parameter:
        """Return the parameter that a view of `page` shows."""
        return self._places[page.index].at(int(tensor.storage_offset()) * tensor.element_size())

    def settle(self, graph: Graph) -> None:
        """Keep a graph that is complete, or drop it.

        Raises:
            BudgetError: It finds no room and recompute=False.
        """
        self.collect()
        index, nbytes = graph.unit.index, graph.nbytes
        self._choice.saw(index, nbytes)
        if not graph.alive:
            return
        if nbytes:
            reservation = self._insist(graph) if self._recompute is False else self._find(nbytes)
            if reservation is None:
                self._again.add(index)
                graph.drop()
                return
            self._reservations[graph.number] = reservation
            self._held_bytes += nbytes
            self._stats.graph_peak_bytes = max(self._stats.graph_peak_bytes, self._held_bytes)
        self._stats.graphs_kept += 1
        gone, number = self._gone, graph.number
        self._graphs[number] = weakref.ref(graph, lambda _: gone.append(number))

    def _find(self, nbytes: int) -> Reservation | None:
        """Reserve room; graphs that backward needs later than this one make room."""
        limit_bytes = self._room.limit_bytes - self.beside()
        if nbytes > limit_bytes:
            return None
        while self._held_bytes + nbytes > limit_bytes or not self._room.has(nbytes):
            if not self.drop_oldest():
                return None
        return self._reserve(nbytes, "a graph")

    def _insist(self, graph: Graph) -> Reservation:
        what, budget = f"what {graph.unit.name} saved for backward", self._room.budget
        try:
            return self._reserve(graph.nbytes, what)
        except BudgetError as error:
            raise BudgetError(
                f"recompute=False keeps what every unit saves for backward. "
                f"{graph.unit.name} saved {graph.nbytes / 2**20:.1f} MiB, the units before it "
                f"{self._held_bytes / 2**20:.1f} MiB, but only "
                f"{budget.available_bytes / 2**20:.1f} MiB of "
                f"{self._room.setting}={budget.limit_bytes / GIB:.3f} are left. Raise "
                f"{self._room.setting}, set recompute='auto', or make batches smaller."
            ) from error

    def _reserve(self, nbytes: int, what: str) -> Reservation:
        with torch.inference_mode(False), torch.no_grad():
            return self._room.reserve(nbytes, "graphs", what)

    # -- backward ---------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Note how many graphs the forward pass that has ended kept."""
        if not self._ran:
            return
        self._choice.end_pass()
        stats, before = self._stats, self._stats.units_kept
        stats.units_run, stats.units_kept = len(self._ran), len(self._ran - self._again)
        self._ran, self._again = set(), set()
        # The first pass finds out what graphs take, the second one chooses.
        if self._told < 1 or (self._told < 2 and before != stats.units_kept):
            log.info(
                "graphs kept for %d of %d units, %.2f GiB%s",
                stats.units_kept,
                stats.units_run,
                self._held_bytes / GIB,
                "" if stats.units_kept == stats.units_run else "; backward runs the others again",
            )
        self._told += 1

    def awaits(self, page: Page) -> bool:
        """Return whether the backward of a kept graph may still read `page`."""
        return any(
            g is not None and g.awaits(page) for g in (ref() for ref in self._graphs.values())
        )

    def drop_oldest(self, *, empty: bool = False) -> bool:
        """Let go of the graph that backward needs last; False where none may be dropped.

        Args:
            empty: Whether one will do that holds nothing but what its unit received.
        """
        self.collect()
        if self._recompute is False:
            return False
        for reference in self._graphs.values():
            graph = reference()
            if graph is None or not graph.alive:
                continue
            if empty or graph.number in self._reservations:
                graph.drop()
                del self._graphs[graph.number]
                self._free(graph.number)
                self._again.add(graph.unit.index)
                self._stats.graphs_kept -= 1
                return True
        return False

    def collect(self) -> None:
        """Give back what graphs held that have ended."""
        while self.ended:
            self._free(self.ended.popleft())
        while self._gone:
            # One that was dropped is not listed any more.
            self._graphs.pop(self._gone.popleft(), None)

    def _free(self, number: int) -> None:
        reservation = self._reservations.pop(number, None)
        if reservation is not None:
            self._held_bytes -= reservation.nbytes
            reservation.free()
