"""Gradients of units that have run backward but whose pages miss some: they leave a device too.

An expert that was not chosen, a parameter that is frozen or not used gets no gradient, and nobody
says so before backward ends. Until then there would be room on the device for all of the page.
"""

from __future__ import annotations

from collections.abc import Collection

from mt_lightning.engine.gradients import Gradients
from mt_lightning.pager.pool import WeightPool


def complete_idle(gradients: Gradients, pool: WeightPool, resident: Collection[int]) -> bool:
    """Take in what arrived for one page that nobody holds any more; False where there is none.

    Should more arrive, it is added, as in another backward.
    """
    for page in gradients.unfinished():
        entry = pool.entry(page)
        if page.index not in resident and (entry is None or not entry.pins):
            gradients.complete(page)
            return True
    return False
