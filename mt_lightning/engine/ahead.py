"""What is begun before it is needed: reads, updates that wait, and copies to the device."""

from __future__ import annotations

from collections.abc import Callable

from mt_lightning.engine.runtime import Runtime
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pager.read_ahead import ReadAhead
from mt_lightning.pages.table import Page, PageTable


def read_ahead(
    ahead: ReadAhead, table: PageTable, pool: WeightPool, ahead_of_use: Callable[[Page], None]
) -> list[PoolEntry]:
    """Begin to read the pages expected next; return those that are in RAM or on their way.

    Args:
        ahead: Says which come next, and how far to go.
        table: All pages.
        pool: Their frames.
        ahead_of_use: Begins the update of a page that waits for it.
    """
    kept = []
    for index in ahead.upcoming():
        page = table[index]
        if pool.entry(page) is None and not ahead.lets(index, pool.unused_bytes):
            break
        ahead_of_use(page)
        entry = pool.prefetch(page)
        if entry is None:
            break
        kept.append(entry)
    for entry in kept:
        pool.release(entry)
    return kept


def prepare(run: Runtime) -> None:
    """Begin to read, to update and to bring the pages expected next, nearest first.

    What comes sooner never makes room for what comes later: it would be read twice.
    """
    read_ahead(run.ahead, run.build.table, run.pool, run.steps.ahead_of_use)
    near_bytes = 0
    for index in run.ahead.upcoming():
        page = run.build.table[index]
        near_bytes += page.layout.nbytes
        if near_bytes > run.planes.ahead_bytes:
            break
        # A page whose update has not begun would have to be brought once more.
        if run.steps.is_due(page) or not run.planes.prefetch(page):
            break
