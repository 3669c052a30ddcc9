"""Page files for inputs of units: temporary, of no commit, never synced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from mt_lightning.errors import BudgetError, StorageError
from mt_lightning.tiers.checkpoint_files import kept_bytes
from mt_lightning.tiers.filesystem import free_bytes
from mt_lightning.tiers.store import Store

GIB = 1 << 30
_SUFFIX = ".input.0"
_MARGIN_BYTES = 1 << 30


class InputFiles:
    """One file for each tensor that is away; files are used again by tensors of the same length.

    Args:
        store: Where they lie.
        directories: Those of the store.
        planned_bytes: All other files of the run.
        max_bytes: `max_disk_gb`, None for what is free.
        usable: Whether files take anything off memory at all.
    """

    def __init__(
        self,
        store: Store,
        directories: Sequence[str],
        planned_bytes: int,
        max_bytes: int | None,
        *,
        usable: bool = True,
    ) -> None:
        self._store = store
        self._directories = list(directories)
        self._planned_bytes = planned_bytes
        self._max_bytes = max_bytes
        self.usable = usable
        self.num_bytes = 0
        self._num_made = 0
        self._sizes: dict[str, int] = {}
        self._free: dict[int, list[str]] = {}
        self._idle: set[str] = set()
        self.discard_all()

    def take(self, nbytes: int) -> str:
        """Return a file of `nbytes` that nobody uses.

        Raises:
            BudgetError: `max_disk_gb` has no room for it.
            StorageError: The disk has none, or failed.
        """
        free = self._free.get(nbytes)
        if free:
            name = free.pop()
            self._idle.discard(name)
            return name
        self._check_room(nbytes)
        name = f"i{self._num_made:05}{_SUFFIX}"
        self._store.create(name, nbytes)
        self._num_made += 1
        self._sizes[name] = nbytes
        self.num_bytes += nbytes
        return name

    def give(self, name: str) -> None:
        """Take a file back; nothing reads or writes it any more."""
        self._free.setdefault(self._sizes[name], []).append(name)

    def end_of_step(self) -> None:
        """Delete the files that were not used since this was last called."""
        free = [name for names in self._free.values() for name in names]
        for name in free:
            if name in self._idle:
                self._free[self._sizes[name]].remove(name)
                self._delete(name)
        self._idle = {name for name in free if name in self._sizes}

    def discard_all(self) -> None:
        """Delete every file, those of a run that was killed included."""
        self._sizes.clear()
        self._free.clear()
        self._idle.clear()
        self.num_bytes = 0
        for name in self._store.names():
            if name.endswith(_SUFFIX):
                # What cannot be deleted now is deleted when the directory is used again.
                with contextlib.suppress(StorageError):
                    self._store.delete(name)

    def room_bytes(self) -> int:
        """Return how many bytes of inputs the disk is expected to take, those in use included."""
        if not self.usable:
            return 0
        try:
            free = min(free_bytes(directory) for directory in self._directories)
        except OSError:
            return self.num_bytes
        room = self.num_bytes + max(0, free - _MARGIN_BYTES)
        return room if self._max_bytes is None else max(0, min(room, self._left(self._max_bytes)))

    def _left(self, max_bytes: int) -> int:
        return max_bytes - self._planned_bytes - kept_bytes(self._directories)

    def _check_room(self, nbytes: int) -> None:
        if self._max_bytes is None:
            return
        needed = self.num_bytes + nbytes
        left = self._left(self._max_bytes)
        if needed <= left:
            return
        smallest_gb = math.ceil((self._max_bytes + needed - left) / GIB * 1e6) / 1e6
        error = BudgetError(
            f"the inputs of units need {needed / 2**20:.1f} MiB on disk beside the pages, but "
            f"max_disk_gb={self._max_bytes / GIB:.6g} leaves {max(0, left) / 2**20:.1f} MiB for "
            f"them. Raise max_disk_gb (this much needs {smallest_gb:.6f}), raise max_ram_gb, or "
            "make batches smaller."
        )
        error.smallest_gb = smallest_gb
        raise error

    def _delete(self, name: str) -> None:
        self.num_bytes -= self._sizes.pop(name)
        self._store.delete(name)
