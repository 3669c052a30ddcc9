"""Predict the bytes that training reads and writes, from sizes and order alone.

Written from the description of the policy, not from the package, of which nothing is imported. It
covers a chain of units that each hold one page, run forward in order and backward in reverse, under
an element-wise optimizer; and one resident page of parameters outside the units.

[Note: what decides]
Weights stay in frames. Of those that nobody holds, the one needed last goes first: the order is
known from the second forward on, and backward is the reverse of forward from the first. What is not
known to be needed goes before, the least recently used first. A page is read ahead into frames that
are needed later than it; beyond one unit's bytes it is not, while a frame that is needed still
later is in use. Updates and spills are jobs: a job holds its page's frame (an update) and its
gradient until it is retired, at most two are pending, the oldest is retired first: when a third
comes, when its page is needed, or when memory runs out and no frame can go. Nothing depends on when
a job is really done.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

BLOCK_BYTES = 4 << 20
MAX_PENDING = 2
RESIDENT = -1
THROUGH_BYTES = 2 * 4 * 4096
"""What inputs of units are written through."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one page; its optimizer state comes and goes in chunks."""

    weight_bytes: int
    grad_bytes: int
    chunk_bytes: tuple[int, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of all its state."""
        return sum(self.chunk_bytes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run; `units` are in the order of the forward."""

    units: tuple[Sizes, ...]
    resident: Sizes
    budget_bytes: int
    depth: int
    deferred: bool
    micro_batches: int = 1
    input_bytes: tuple[int, ...] = ()
    """What each unit receives from a micro-batch."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes set aside for the whole run, without the weights of the resident page."""
        # Gradients on disk come and go in the same slices; AdamW has two values of state for each.
        chunk_bytes = max(max(unit.chunk_bytes) for unit in self.units)
        staging_bytes = chunk_bytes // 2
        return (
            THROUGH_BYTES
            + 3 * chunk_bytes
            + staging_bytes
            + 2 * self.resident.grad_bytes
            + self.resident.state_bytes
        )

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget: what is fixed, and the largest unit with its gradients."""
        need = max(unit.weight_bytes + unit.grad_bytes for unit in self.units)
        return self.fixed_bytes + self.resident.weight_bytes + need

    @property
    def everything_bytes(self) -> int:
        """A budget in which nothing is ever read again."""
        return self.smallest_bytes + sum(
            unit.weight_bytes + unit.grad_bytes + unit.state_bytes for unit in self.units
        )


class Simulator:
    """Plays one run; `read_bytes` and `written_bytes` count from the end of set-up."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.read_bytes = self.written_bytes = 0
        self.spilled, self.cached = self._places()
        self._free = case.budget_bytes - case.fixed_bytes
        self._free -= sum(self.cached.values())
        self._pins: OrderedDict[int, int] = OrderedDict()  # of each page in RAM, oldest use first
        self._jobs: deque[tuple[int | None, int, bool]] = deque()  # page, gradient bytes, pinned
        self._in_ram: dict[int, bool] = {}  # gradients held in RAM
        self._on_disk: set[int] = set()  # spilled sums
        self._stepped: set[int] = set()  # pages that have optimizer state
        self._due: dict[int, None] = {}
        self._num_forwards = 0
        self._at = 0
        self._returning = False
        self._visited: set[int] = set()
        self._unused: set[int] = set()  # read ahead, and not needed yet
        self._commit_owed = False
        self._inputs = self._kept_inputs()
        self._passed = 0  # an input that nobody needs, until somebody looks
        for page in (RESIDENT, *range(len(case.units))):
            self._pin(page)
            self._pins[page] -= 1
        self._pin(RESIDENT)
        self.read_bytes = 0

    def run(self, num_steps: int) -> Iterator[tuple[int, int]]:
        """Yield the bytes read and written so far after each micro-batch, then after the end."""
        for _ in range(num_steps):
            for micro in range(self.case.micro_batches):
                last = micro == self.case.micro_batches - 1
                self._forward()
                self._backward(eager=last and not self.case.deferred)
                if last:
                    self._step()
                yield self.read_bytes, self.written_bytes
        for page in list(self._due):
            self._update(page)
        yield self.read_bytes, self.written_bytes

    # -- the model --------------------------------------------------------------------------------

    def _forward(self) -> None:
        self._free_passed()
        for page in range(len(self.case.units)):
            self._make_room(self._inputs[page])
            self._free -= self._inputs[page]
            self._enter(page, grads=False)
            self._pins[page] -= 1

    def _free_passed(self) -> None:
        self._free += self._passed
        self._passed = 0

    def _backward(self, *, eager: bool) -> None:
        for page in list(self._due):
            self._update(page)
        if self._commit_owed:
            self._commit()
        before: int | None = None
        for page in reversed(range(len(self.case.units))):
            if before is not None:
                self._pins[before] -= 1
                self._free += self._inputs[before]
                if eager:
                    self._update(before)
            self._enter(page, grads=True)
            self._complete(page)
            if not eager and page in self.spilled:
                self._spill(page)
            before = page
        assert before is not None
        self._pins[before] -= 1
        if eager:
            self._update(before)
        self._passed = self._inputs[before]

    def _enter(self, page: int, *, grads: bool) -> None:
        self._observe(page, backward=grads)
        if page in self._due:
            self._update(page)
        self._retire_page(page)
        self._pin(page)
        if grads:
            self._make_room(self.case.units[page].grad_bytes)
            self._free -= self.case.units[page].grad_bytes
        kept = []
        for ahead in self._predict():
            if not self._prefetch(ahead):
                break
            kept.append(ahead)
            self._pins[ahead] += 1  # what comes sooner is not given up for what comes later
            if ahead in self._due and self._num_pending < MAX_PENDING:
                self._update(ahead)
        for ahead in kept:
            self._pins[ahead] -= 1

    def _complete(self, page: int) -> None:
        if self._in_ram.get(page):
            self._free += self.case.units[page].grad_bytes  # added to the one that is held
        self._in_ram[page] = True

    def _step(self) -> None:
        if self.case.deferred:
            while self._jobs:
                self._retire()
        while any(page is None for page, _, _ in self._jobs):
            self._retire()
        self._pins.move_to_end(RESIDENT)
        self.written_bytes += self.case.resident.weight_bytes + self.case.resident.state_bytes
        for page in range(len(self.case.units)):
            self._retire_page(page)
            if self.case.deferred:
                self._due[page] = None
        self._commit_owed = self.case.deferred
        self._free_passed()
        if not self.case.deferred:
            self._commit()

    # -- jobs -------------------------------------------------------------------------------------

    def _update(self, page: int) -> None:
        unit = self.case.units[page]
        self._due.pop(page, None)
        self._retire_page(page)
        self._pin(page)
        if page in self._on_disk:
            self.read_bytes += unit.weight_bytes
            self._on_disk.remove(page)
        if page in self._stepped:
            self.read_bytes += unit.state_bytes - self.cached[page]
        self._stepped.add(page)
        self.written_bytes += unit.weight_bytes + unit.state_bytes
        self._submit(page, pinned=True)

    def _spill(self, page: int) -> None:
        if page in self._on_disk:
            self.read_bytes += self.case.units[page].weight_bytes
        self._on_disk.add(page)
        self.written_bytes += self.case.units[page].weight_bytes
        self._submit(page, pinned=False)

    def _submit(self, page: int, *, pinned: bool) -> None:
        while self._num_pending >= MAX_PENDING:
            self._retire()
        held = self._in_ram.pop(page, False)
        self._jobs.append((page, self.case.units[page].grad_bytes if held else 0, pinned))

    @property
    def _num_pending(self) -> int:
        return sum(job[0] is not None for job in self._jobs)

    def _commit(self) -> None:
        self._commit_owed = False
        self._jobs.append((None, 0, False))

    def _retire(self) -> None:
        page, grad_bytes, pinned = self._jobs.popleft()
        self._free += grad_bytes
        if pinned and page is not None:
            self._pins[page] -= 1

    def _retire_page(self, page: int) -> None:
        while any(job[0] == page for job in self._jobs):
            self._retire()

    # -- weights in RAM ---------------------------------------------------------------------------

    def _weight_bytes(self, page: int) -> int:
        return (self.case.resident if page == RESIDENT else self.case.units[page]).weight_bytes

    def _pin(self, page: int) -> None:
        if page not in self._pins:
            self._make_room(self._weight_bytes(page))
            self._load(page)
        self._unused.discard(page)
        self._pins.move_to_end(page)
        self._pins[page] += 1

    def _prefetch(self, page: int) -> bool:
        if page not in self._pins:
            victims = self._victims_for(page)
            if victims is None:
                return False
            for victim in victims:
                self._drop(victim)
            self._load(page)
            self._unused.add(page)
        self._pins.move_to_end(page)
        return True

    def _victims_for(self, page: int) -> list[int] | None:
        lacking = self._weight_bytes(page) - self._free
        own = self._distance(page)
        idle = [other for other, pins in self._pins.items() if not pins]
        later = [o for o in idle if self._distance(o) > own or self._distance(o) == inf]
        held = [self._distance(o) for o in self._pins if o not in idle and o != RESIDENT]
        last_held = max((distance for distance in held if distance < inf), default=0)
        ahead = sum(self._weight_bytes(other) for other in (*self._unused, page))
        if ahead <= max(unit.weight_bytes for unit in self.case.units):
            last_held = 0
        victims = []
        for other in sorted(later, key=self._distance, reverse=True):
            if lacking <= 0:
                break
            if self._distance(other) < last_held:
                return None
            victims.append(other)
            lacking -= self._weight_bytes(other)
        return victims if lacking <= 0 else None

    def _load(self, page: int) -> None:
        self._free -= self._weight_bytes(page)
        self._pins[page] = 0
        self.read_bytes += self._weight_bytes(page)

    def _make_room(self, nbytes: int) -> None:
        while self._free < nbytes:
            if not self._evict():
                assert self._jobs, "starved: this simulator does not cover gradients that must go"
                self._retire()

    def _evict(self) -> bool:
        idle = [page for page, pins in self._pins.items() if not pins]
        if not idle:
            return False
        self._drop(max(idle, key=self._distance))
        return True

    def _drop(self, page: int) -> None:
        self._unused.discard(page)
        del self._pins[page]
        self._free += self._weight_bytes(page)

    # -- what comes next --------------------------------------------------------------------------

    def _observe(self, page: int, *, backward: bool) -> None:
        self._num_forwards += page == 0 and not backward
        self._at, self._returning = page, backward
        self._visited.add(page)

    def _distance(self, page: int) -> float:
        """How many accesses lie before the next one of `page`."""
        if page not in self._visited:
            return inf
        if self._returning:
            return self._at - page if page < self._at else self._at + page
        last = len(self.case.units) - 1
        return page - self._at if page > self._at else 2 * last - self._at - page + 1

    def _predict(self) -> list[int]:
        order = range(len(self.case.units))
        before, after = order[: self._at][::-1], order[self._at + 1 :]
        knows = self._num_forwards > 1
        if self._returning:
            expected = [*before, *order] if knows else before
        else:
            expected = [*after, *order[::-1]] if knows else ()
        return list(dict.fromkeys(expected))[: self.case.depth]

    # -- the plan ---------------------------------------------------------------------------------

    def _kept_inputs(self) -> tuple[int, ...]:
        """Return what stays in RAM between forward and backward: all, or nothing, in these cases.

        At the smallest budget all of it goes to disk, or lies there while its unit runs, uncounted.
        """
        case = self.case
        none = (0,) * len(case.units)
        if case.budget_bytes == case.smallest_bytes or not case.input_bytes:
            return none
        assert case.budget_bytes - case.smallest_bytes >= case.micro_batches * sum(case.input_bytes)
        return case.input_bytes

    def _places(self) -> tuple[set[int], dict[int, int]]:
        """Return pages whose gradients wait on disk, and how much state of each stays in RAM."""
        case = self.case
        spare = case.budget_bytes - case.smallest_bytes
        assert spare >= 0
        spilled: set[int] = set()
        if case.deferred or case.micro_batches > 1:
            for page in reversed(range(len(case.units))):
                if case.units[page].grad_bytes <= spare:
                    spare -= case.units[page].grad_bytes
                else:
                    spilled.add(page)
        room = spare - sum(unit.weight_bytes for unit in case.units)
        cached = dict.fromkeys(range(len(case.units)), 0)
        for page, unit in enumerate(case.units) if not spilled else ():
            for chunk_bytes in unit.chunk_bytes:
                if chunk_bytes <= room:
                    cached[page] += chunk_bytes
                    room -= chunk_bytes
        return spilled, cached
