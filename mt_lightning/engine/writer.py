"""The one way by which weights are born or changed outside the update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mt_lightning.engine.binding import Binder
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pages.table import Page


class PageWriter:
    """Opens pages for writing: their parameters show frames in RAM, written in good time."""

    def __init__(self, pool: WeightPool, binder: Binder) -> None:
        self._pool = pool
        self._binder = binder
        self._open: dict[int, PoolEntry] = {}
        self.dirty = False

    def open(self, page: Page) -> PoolEntry:
        """Bring a page to RAM and return its pinned entry."""
        entry = self._pool.open(page)
        entry.wait()
        if entry.frame.in_use() and not self._binder.is_bound(page):
            entry = self._pool.copy_on_write(page)
        self._open[page.index] = entry
        return entry

    def close(self, page: Page) -> None:
        """Let a page go; it is written when its frame is dropped or flushed."""
        entry = self._open.pop(page.index)
        entry.dirty = self.dirty = True
        self._pool.close(entry)

    @contextmanager
    def writing(self, pages: Iterable[Page]) -> Iterator[None]:
        """Let the parameters of `pages` show their frames, writable, inside the block."""
        pages = list(pages)
        opened = []
        try:
            for page in pages:
                self._binder.show(page, self.open(page).frame.tensor)
                opened.append(page)
            yield
        finally:
            for page in opened:
                self._binder.blank(page)
                self.close(page)

    def flush(self) -> None:
        """Write everything that was changed."""
        self._pool.flush()
        self.dirty = False
