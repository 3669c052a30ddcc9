"""What updates left in RAM, and its way to the slots of its pages.

[Note: dirty frames]
With commits at checkpoints an update leaves what fits in RAM where it is: weights in the pool,
state in the frames of the chunks that stay. It takes no memory that was not taken anyway. A commit
writes it to the slots that the last commit does not name; a weight frame that has to go before is
written when it goes. What never fits is written by every update, over what the one before it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from mt_lightning.engine.ending import wait_for_all
from mt_lightning.engine.state_stream import StateStream
from mt_lightning.pager.planes import Planes
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pages.table import PageTable, Plane
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.store import Store


class WriteBack:
    """Writes dirty frames.

    Args:
        table: The pages.
        pool: Weights in RAM.
        store: Page files.
        io: I/O threads.
        streams: State in RAM.
        resident: Pages that no unit holds.
        active: Whether updates leave anything in RAM.
        planes: Where units compute, and may be updated.
    """

    def __init__(
        self,
        table: PageTable,
        pool: WeightPool,
        store: Store,
        io: IOQueue,
        streams: Sequence[StateStream],
        resident: Collection[int],
        *,
        active: bool,
        planes: Planes,
    ) -> None:
        self._table = table
        self._pool = pool
        self._store = store
        self._io = io
        self._streams = streams
        self._resident = frozenset(resident)
        self._held: list[PoolEntry] | None = None
        self.active = active
        self._planes = planes

    def hold(self) -> Callable[[], None]:
        """Keep in RAM what a `write` on the update worker will find; called by the training thread.

        Returns:
            What lets go, once that is done.
        """
        if not self.active:
            return lambda: None
        assert self._held is None
        self._come_home()
        held = self._pool.entries()
        for entry in held:
            # User code may write to these at any time, also while another thread reads them.
            if entry.dirty and entry.page.index in self._resident:
                self._pool.write_back(entry)
        for entry in held:
            entry.pins += 1
        self._held = held

        def let_go() -> None:
            self._held = None
            for entry in held:
                self._pool.release(entry)

        return let_go

    def _come_home(self) -> None:
        """Have on the host what was updated on a device; called by the training thread."""
        with torch.inference_mode(False), torch.no_grad():
            self._planes.come_home()
            for stream in self._streams:
                stream.come_home()

    def write(self) -> set[str]:
        """Write all that is dirty and make it current; no update runs meanwhile.

        Returns:
            The files written since the last call, also those of frames that had to go.

        Raises:
            StorageError: A write failed.
        """
        touched, self._pool.written = self._pool.written, set()
        if not self.active:
            return touched
        if self._held is None:
            self._come_home()

        def prepare(plane: Plane, slot: int) -> str:
            name = f"{plane.key}.{slot}"
            self._store.prepare_write(name, plane.nbytes, keep=plane.slot == slot)
            touched.add(name)
            return name

        entries = self._pool.entries() if self._held is None else self._held
        under_way = []
        for entry in entries:
            if entry.dirty:
                plane = entry.page.weight
                slot = plane.next_slot
                name = prepare(plane, slot)
                ticket = self._io.write(name, [(0, entry.frame.memory)])
                under_way.append((entry, slot, ticket))
        try:
            for stream in self._streams:
                stream.write_back(self._table, prepare)
        finally:
            wait_for_all([ticket for _, _, ticket in under_way])
        for entry, slot, ticket in under_way:
            entry.page.weight.advance(slot, [list(ticket.sums)])
            entry.dirty = False
        return touched
