"""What is begun before it is needed: reads, updates that wait, and copies to the device."""

from __future__ import annotations

from mt_lightning.engine.runtime import Runtime


def prepare(run: Runtime) -> None:
    """Begin to read, to update and to bring the pages expected next, nearest first.

    What comes sooner never makes room for what comes later: it would be read twice.
    """
    kept = []
    for index in run.ahead.upcoming():
        page = run.build.table[index]
        absent = run.pool.entry(page) is None
        if absent and not run.ahead.lets(index, run.pool.unused_bytes):
            break
        run.steps.ahead_of_use(page)
        entry = run.pool.prefetch(page)
        if entry is None:
            break
        kept.append(entry)
    for entry in kept:
        run.pool.release(entry)
    near_bytes = 0
    for index in run.ahead.upcoming():
        page = run.build.table[index]
        near_bytes += page.layout.nbytes
        if near_bytes > run.planes.ahead_bytes:
            break
        # A page whose update has not begun would have to be brought once more.
        if run.steps.is_due(page) or not run.planes.prefetch(page):
            break
