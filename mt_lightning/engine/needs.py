"""Bytes that a run needs at once, in RAM and on disk, by unit and by page."""

from __future__ import annotations

import torch

from mt_lightning.engine.build import Build
from mt_lightning.engine.units import Unit
from mt_lightning.pages.sizes import ALIGN_BYTES, BLOCK_BYTES, align_up
from mt_lightning.pages.state import MASTER_REST
from mt_lightning.pages.table import Page


def longest_range(page: Page) -> int:
    """Bytes of gradients that pass through RAM at once on their way from or to disk."""
    longest = min(BLOCK_BYTES, page.layout.nbytes)
    if page.state_layout.sliced and page.state_layout.chunks:
        longest = page.state_layout.longest_range_bytes
    return spill_place(page, 0, longest, 0)[1]


def spill_place(page: Page, start: int, stop: int, number: int) -> tuple[int, int]:
    """Return where a part of a gradient lies in its file, and how long it is there.

    Args:
        page: The page.
        start: Where the weights of that part begin in their plane.
        stop: Where they end.
        number: Of the chunk, where parts are chunks: they begin on blocks of the drive.
    """
    if not page.layout.spills_halves:
        return start, stop - start
    gaps = 0 if page.state_layout.halves_on_blocks else ALIGN_BYTES * number
    return align_up(start // 2) + gaps, align_up((stop - start) // 2)


def spill_bytes(page: Page) -> int:
    """Return the length of the file of a gradient."""
    chunks = page.state_layout.chunks if page.state_layout.sliced else ()
    if not (chunks and page.layout.spills_halves):
        return spill_place(page, 0, page.layout.nbytes, 0)[1]
    last = chunks[-1]
    return sum(spill_place(page, last.start, last.stop, last.index))


def widened_bytes(page: Page) -> int:
    """Bytes of the fp32 gradients that are made of narrow ones for an update of a chunk."""
    if not page.layout.rounds:
        return 0
    specs = page.layout.params
    parts = (
        sum(s.stop - s.start for s in chunk.segments if specs[s.param].dtype == torch.float32)
        for chunk in page.state_layout.chunks
    )
    return torch.float32.itemsize * max(parts, default=0)


def master_bytes_of(updated: list[Page], resident: list[int]) -> int:
    """Bytes of fp32 masters and gradients at once: the worker's, and of pages that stay in RAM."""
    needs = {False: 0, True: 0}
    for page in updated:
        stays = page.index in resident
        needs[stays] = max(needs[stays], page.state_layout.master_bytes, widened_bytes(page))
    # What changes in those is found by a copy of their weights.
    seen = sum(
        p.layout.nbytes for p in updated if p.index in resident and p.state_layout.has_masters
    )
    return sum(needs.values()) + seen


def rest_bytes_of(build: Build) -> int:
    """Bytes of what fp32 masters have beside their bfloat16 weights."""
    tensors = (t for page in build.table for t in page.state_layout.tensors)
    return sum(tensor.nbytes for tensor in tensors if tensor.key == MASTER_REST)


def file_bytes(build: Build) -> int:
    """Count the bytes of all files but those of spilled gradients."""
    slots = {page.index: 1 if page.layout.optimizer is None else 2 for page in build.table}
    weights = sum(slots[page.index] * page.layout.nbytes for page in build.table)
    return weights + sum(2 * page.state_layout.nbytes for page in build.table)


def unit_need(unit: Unit, build: Build, trains: bool) -> int:
    """Bytes that must be in RAM at once while `unit` runs, backward included."""
    mine = [build.table[index] for index in unit.pages]
    need = sum(page.layout.nbytes for page in mine)
    if not trains:
        return need
    need += sum(page.layout.grad_bytes for page in mine if len(page.layout.units) == 1)
    for page in build.table:
        uses = len(page.layout.units)
        if uses > 1:
            # Autograd holds one partial gradient for each use that its backward has passed.
            need += page.layout.grad_bytes * (uses if page.index in unit.pages else uses - 1)
    return need


def loading_need(unit: Unit, build: Build) -> int:
    """Bytes that must be in RAM at once while a page is written to as fp32 masters."""
    mine = [build.table[index] for index in unit.pages]
    return max((3 * p.layout.nbytes for p in mine if p.state_layout.has_masters), default=0)
