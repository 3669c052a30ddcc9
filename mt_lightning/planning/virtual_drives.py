"""Drives in virtual time: each its own files, threads and speed, as each has lanes in a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.planning.machines import Machine
from mt_lightning.planning.virtual import READ, WRITE, VirtualClock, VirtualTicket
from mt_lightning.tiers.header import HEADER_BYTES
from mt_lightning.tiers.placing import place_for


class VirtualStore:
    """Files that exist by name and place only.

    Args:
        machine: Its drives.
    """

    def __init__(self, machine: Machine) -> None:
        self._sizes = [drive.size_bytes for drive in machine.drives] or [0]
        self._assigned = dict.fromkeys(range(len(self._sizes)), 0)
        self._places: dict[str, int] = {}

    def create(self, name: str, nbytes: int) -> None:
        """Give a file a place, where it has none."""
        if name in self._places:
            return
        needed = HEADER_BYTES + nbytes
        free = {place: self._sizes[place] - has for place, has in self._assigned.items()}
        self._places[name] = place = place_for(name, needed, self._places, self._assigned, free)
        self._assigned[place] += needed

    def drive_of(self, name: str) -> int:
        """Return the number of the drive that a file lies on."""
        return self._places[name]

    def prepare_write(self, name: str, nbytes: int, *, keep: bool = False) -> None:
        """Make a slot ready."""
        self.create(name, nbytes)


class VirtualIO:
    """Threads of each direction before each drive, as those of `IOQueue` are.

    Args:
        clock: The clock.
        machine: Its drives.
        store: Says which file lies where.
        block_bytes: What a thread moves at a time.
        num_threads: Threads of each direction on each drive.

    Attributes:
        bytes: What each drive has moved in each direction.
    """

    def __init__(
        self,
        clock: VirtualClock,
        machine: Machine,
        store: VirtualStore,
        block_bytes: float,
        num_threads: int = 4,
    ) -> None:
        self._clock, self._store, self._block = clock, store, block_bytes
        self._drives = machine.drives
        lanes = [(drive, way) for drive in range(len(self._drives)) for way in (READ, WRITE)]
        self._queues: dict[tuple[int, str], deque[VirtualTicket]] = {k: deque() for k in lanes}
        self._idle = dict.fromkeys(lanes, num_threads)
        self._free_at = dict.fromkeys(lanes, 0.0)
        self.bytes: Counter[tuple[int, str]] = Counter()

    def read(self, name: str, pieces: Sequence[Any], sums: Any = None) -> VirtualTicket:
        """Ask for bytes."""
        return self.move(READ, sum(memory.nbytes for _, memory in pieces), name)

    def write(self, name: str, pieces: Sequence[Any]) -> VirtualTicket:
        """Ask to write bytes."""
        return self.move(WRITE, sum(memory.nbytes for _, memory in pieces), name)

    def move(self, channel: str, nbytes: float, name: str) -> VirtualTicket:
        """Ask for a transfer; a file that is not there yet is made, as long as that."""
        self._store.create(name, int(nbytes))
        lane = self._store.drive_of(name), channel
        ticket = VirtualTicket(self._clock, lane, nbytes, name)
        if nbytes:
            self.bytes[lane] += nbytes  # type: ignore[assignment]
            self._queues[lane].append(ticket)
            self._begin(lane)
        return ticket

    def hurry(self, ticket: VirtualTicket) -> None:
        """Let a request go before all others of its drive that have not begun."""
        queue = self._queues[ticket.channel]
        if ticket.left_bytes > 0 and queue[0] is not ticket:
            queue.remove(ticket)
            queue.appendleft(ticket)

    def _begin(self, lane: tuple[int, str]) -> None:
        clock, queue, (number, channel) = self._clock, self._queues[lane], lane
        drive = self._drives[number]
        while self._idle[lane] and queue:
            ticket = queue[0]
            nbytes = min(self._block, ticket.left_bytes)
            ticket.left_bytes -= nbytes
            if ticket.left_bytes <= 0:
                queue.popleft()
            self._idle[lane] -= 1
            begin = max(clock.now, self._free_at[lane])
            both = (nbytes, 0.0) if channel == READ else (0.0, nbytes)
            end = begin + drive.seconds(*both)
            self._free_at[lane] = end
            if drive.mixed_bytes_per_s is None:  # it takes turns
                self._free_at[number, READ] = self._free_at[number, WRITE] = end
            clock.note(channel, ticket.name, begin, end)
            done = end + drive.latency_s * nbytes / BLOCK_BYTES
            clock.at(done, lambda t=ticket, n=nbytes: self._end(t, n))

    def _end(self, ticket: VirtualTicket, nbytes: float) -> None:
        ticket.unfinished_bytes -= nbytes
        self._idle[ticket.channel] += 1
        self._begin(ticket.channel)
