"""What a step reads of weights, from sizes and order alone.

[Note: what is played] The units run forward and back, and each brings its weights. Who has to go is
who is needed last: forward that is the first unit, backward the last one. Beside weights RAM holds
gradients, and of at most two updates or spills that wait all that they need: their number changes
from unit to unit, and with it what is found at the next turn. Reading ahead changes when weights
come, not which; so nothing of time is in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import chain

from mt_lightning.engine.build import Build
from mt_lightning.engine.worker import MAX_PENDING
from mt_lightning.pages.table import Page

_WARM_STEPS, _DISTINCT_SWEEPS = 2, 3


def weight_reads(
    build: Build, room: int, spilled: set[int], *, eager: bool, trains: bool, num_sweeps: int
) -> int:
    """Return the bytes of weights that a step reads once the steps before it have filled RAM.

    Args:
        build: The pages.
        room: Memory for weights of units and their gradients.
        spilled: Pages whose gradients go to disk where they have to wait.
        eager: Whether the last backward hands its gradients to updates.
        trains: Whether there are updates.
        num_sweeps: How often a step goes over the units and back.
    """
    if num_sweeps > _DISTINCT_SWEEPS:  # those in the middle of a step are all alike
        most, less = (
            weight_reads(build, room, spilled, eager=eager, trains=trains, num_sweeps=count)
            for count in (_DISTINCT_SWEEPS, _DISTINCT_SWEEPS - 1)
        )
        return most + (num_sweeps - _DISTINCT_SWEEPS) * (most - less)
    played = _Played(build, room, spilled, trains)
    for _ in range(_WARM_STEPS):
        played.step(num_sweeps, eager=eager)
    before = played.read_bytes
    played.step(num_sweeps, eager=eager)
    return played.read_bytes - before


class _Played:
    """RAM in the course of a step."""

    def __init__(self, build: Build, room: int, spilled: set[int], trains: bool) -> None:
        self._units = [
            [build.table[i] for i in unit.pages if i not in build.resident] for unit in build.units
        ]
        self._names = [unit.name for unit in build.units]
        self._trained = {p.index for p in build.table if trains and p.layout.optimizer is not None}
        self._place: dict[int, int] = {}
        for place, pages in enumerate(self._units):
            self._place.update({page.index: place for page in pages})
        self._bytes = {page.index: page.layout.nbytes for page in build.table}
        self._free, self._spilled = room, spilled
        self._there: list[tuple[int, int]] = []
        """Place and page of the weights in RAM, in the order of the units."""
        self._pinned: dict[int, int] = {}
        self._grads: dict[int, int] = {}
        self._jobs: deque[tuple[int, int, bool]] = deque()
        self._at, self._returns = 0, False
        self.read_bytes = 0

    def step(self, num_sweeps: int, *, eager: bool) -> None:
        """Run the units forward and back so many times."""
        for sweep in range(num_sweeps):
            self._forward(due=not (sweep or eager))
            self._backward(eager=eager and sweep == num_sweeps - 1)
        while self._jobs:
            self._retire()

    def _forward(self, *, due: bool) -> None:
        self._returns = False
        for place, pages in enumerate(self._units):
            self._at = place
            for page in pages:
                self._retire_page(page.index)
                self._pin(page.index)
                if due:  # its update waited for this
                    self._free += self._grads.pop(page.index, 0)
            for page in pages:
                self._pinned[page.index] -= 1

    def _backward(self, *, eager: bool) -> None:
        self._returns = True
        for place in reversed(range(len(self._units))):
            self._at, pages = place, self._units[place]
            for page in pages:
                self._retire_page(page.index)
                self._pin(page.index)
            for page in pages:
                if page.index in self._trained:
                    self._make_room(page.layout.grad_bytes)
                    if page.index not in self._grads:
                        self._grads[page.index] = page.layout.grad_bytes
                        self._free -= page.layout.grad_bytes
            for page in pages:
                self._pinned[page.index] -= 1
            for page in pages:
                if page.index in self._trained and page.layout.units[0] == self._names[place]:
                    self._end(page, eager=eager)

    def _end(self, page: Page, *, eager: bool) -> None:
        held = self._grads[page.index]
        self._free += held - page.layout.waiting_bytes
        self._grads[page.index] = page.layout.waiting_bytes
        if eager or page.index in self._spilled:
            self._submit(page.index, pins=eager)

    def _submit(self, page: int, *, pins: bool) -> None:
        while len(self._jobs) >= MAX_PENDING:
            self._retire()
        if pins:
            self._pin(page)
        self._jobs.append((page, self._grads.pop(page, 0), pins))

    def _retire(self) -> None:
        page, grad_bytes, pins = self._jobs.popleft()
        self._free += grad_bytes
        self._pinned[page] -= pins

    def _retire_page(self, page: int) -> None:
        while any(job[0] == page for job in self._jobs):
            self._retire()

    def _pin(self, page: int) -> None:
        key = (self._place[page], page)
        at = bisect_left(self._there, key)
        if at == len(self._there) or self._there[at] != key:
            self._make_room(self._bytes[page])
            self._free -= self._bytes[page]
            self.read_bytes += self._bytes[page]
            insort(self._there, key)
        self._pinned[page] = self._pinned.get(page, 0) + 1

    def _make_room(self, nbytes: int) -> None:
        while self._free < nbytes:
            if not self._evict():
                if not self._jobs:
                    return
                self._retire()

    def _evict(self) -> bool:
        """Give up what is needed last: furthest behind, and if nothing is there, furthest ahead."""
        there, at = self._there, self._at
        middle = bisect_left(there, (at + self._returns, -1))
        if self._returns:
            order = chain(reversed(range(middle, len(there))), range(middle))
        else:
            order = chain(range(middle), reversed(range(middle, len(there))))
        for number in order:
            page = there[number][1]
            if not self._pinned.get(page):
                del there[number]
                self._free += self._bytes[page]
                return True
        return False
