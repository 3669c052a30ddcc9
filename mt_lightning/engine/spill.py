"""Gradients that wait on disk for a deferred update, because RAM is short."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from mt_lightning.engine.gradients import PageGrads, Spill, flat, is_narrow
from mt_lightning.engine.needs import spill_bytes, spill_place
from mt_lightning.optim.norm import all_finite, grad_norm_of
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.sizes import ALIGN_BYTES
from mt_lightning.pages.state import Chunk
from mt_lightning.pages.table import Page
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import IOQueue, Ticket
from mt_lightning.tiers.store import Store


class Ring:
    """A few frames that chunks stream through; one is reused once its write is done."""

    def __init__(self, frames: list[Frame]) -> None:
        self._num_frames = len(frames)
        self._free = deque(frames)
        self._writing: deque[tuple[Frame, Ticket]] = deque()

    def __len__(self) -> int:
        return self._num_frames

    def acquire(self, *, wait: bool = True) -> Frame | None:
        """Return a free frame; without `wait`, None when none is free at once."""
        if self._free:
            return self._free.popleft()
        if not self._writing or not (wait or self._writing[0][1].done()):
            return None
        frame, ticket = self._writing.popleft()
        ticket.wait()
        return frame

    def release(self, frame: Frame, ticket: Ticket | None = None) -> None:
        """Give a frame back, after `ticket`'s write where one is given."""
        if ticket is None:
            self._free.append(frame)
        else:
            self._writing.append((frame, ticket))


class Spiller:
    """Moves gradients between RAM and the gradient plane; called from the update worker only.

    The plane mirrors the weight plane and is read and written chunk by chunk where the update is,
    else in ranges of `range_bytes`; through staging frames, since tensors made by autograd are not
    aligned for direct I/O.
    """

    def __init__(
        self, store: Store, io: IOQueue, stats: Stats, staging: Ring, range_bytes: int
    ) -> None:
        self._store = store
        self._io = io
        self._stats = stats
        self._staging = staging
        # Halves of ranges begin on blocks of the drive too.
        self._range = max(range_bytes, 2 * ALIGN_BYTES)

    def spill(self, page: Page, grads: PageGrads, *, measure: bool) -> None:
        """Add a page's gradient in RAM to its sum on disk, and drop it from RAM.

        Args:
            page: The page.
            grads: The gradient.
            measure: Whether this may complete the sum, so that norms and finiteness are taken.
        """
        self._add_sum(page, grads)
        spill = grads.spill
        if measure:
            for i, grad in enumerate(grads.ram):
                if grad is not None:
                    spill.norms[i] = grad_norm_of(grad, in_float=is_narrow(page, i, grad))
                    spill.finite &= all_finite(grad)
        only_on_disk = any(grads.ram[i] is None for i in spill.present)
        for start, stop, number in self._ranges(page):
            frame = self._acquire()
            at, nbytes = spill_place(page, start, stop, number)
            if only_on_disk and start in spill.sums:
                # What other parameters have on disk in this range must survive the rewrite.
                self._read(page, spill, start, stop, number, frame)
            else:
                frame.tensor[:nbytes].zero_()
            for i, grad in enumerate(grads.ram):
                if grad is not None:
                    for stored, part in _overlap(page, i, grad, start, stop, frame):
                        stored.copy_(part)
            name = f"{page.layout.key}.grad.0"
            self._store.prepare_write(name, spill_bytes(page))
            ticket = self._io.write(name, [(at, frame.memory[:nbytes])]).wait()
            spill.sums[start] = list(ticket.sums)
            self.release(frame)
        spill.dtypes.update((i, grad.dtype) for i, grad in enumerate(grads.ram) if grad is not None)
        spill.present.update(spill.dtypes)
        grads.ram = [None] * len(grads.ram)
        self._stats.spills += 1

    def gather(self, page: Page, grads: PageGrads) -> None:
        """Complete in RAM what an update needs whole.

        Sums on disk are added to gradients of the last micro-batch. Where the optimizer needs whole
        tensors, gradients that are only on disk are read back too.
        """
        self._add_sum(page, grads)
        if page.state_layout.sliced or not grads.spill.present:
            return
        self._read_back(page, grads, [i for i in grads.spill.present if grads.ram[i] is None])

    def _read_back(self, page: Page, grads: PageGrads, missing: list[int]) -> None:
        for i in missing:
            spec = page.layout.params[i]
            stride = spec.stride if spec.dense else torch.empty(spec.shape, device="meta").stride()
            grads.ram[i] = torch.empty_strided(spec.shape, stride, dtype=grads.spill.dtypes[i])
        for _, stored, part in self.pairs(page, grads, missing):
            part.copy_(stored)

    def fetch(self, page: Page, grads: PageGrads) -> None:
        """Bring everything on disk back to RAM; nothing is on disk afterwards."""
        self._add_sum(page, grads)
        missing = [i for i in grads.spill.present if grads.ram[i] is None]
        self._read_back(page, grads, missing)
        grads.spill = Spill()

    def stage(self, page: Page, grads: PageGrads, chunk: Chunk) -> Frame | None:
        """Read one slice of gradients, where some are only on disk; give back with `release`."""
        if not page.state_layout.sliced or not any(
            grads.ram[s.param] is None and s.param in grads.spill.present for s in chunk.segments
        ):
            return None
        frame = self._acquire()
        self._read(page, grads.spill, chunk.start, chunk.stop, chunk.index, frame)
        return frame

    def release(self, frame: Frame) -> None:
        """Give a staging frame back."""
        self._staging.release(frame)

    def _add_sum(self, page: Page, grads: PageGrads) -> None:
        present = grads.spill.present
        both = [i for i, grad in enumerate(grads.ram) if grad is not None and i in present]
        for _, stored, part in self.pairs(page, grads, both):
            part.add_(stored)

    def pairs(
        self, page: Page, grads: PageGrads, params: list[int]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Read the sums on disk; yield each stored part beside the part of the tensor in RAM."""
        if not params:
            return
        for start, stop, number in self._ranges(page):
            if start in grads.spill.sums:
                frame = self._acquire()
                self._read(page, grads.spill, start, stop, number, frame)
                for i in params:
                    grad = grads.ram[i]
                    assert grad is not None
                    for stored, part in _overlap(page, i, grad, start, stop, frame):
                        yield i, stored, part
                self.release(frame)

    def _ranges(self, page: Page) -> Iterator[tuple[int, int, int]]:
        if page.state_layout.sliced and page.state_layout.chunks:
            yield from (
                (chunk.start, chunk.stop, chunk.index) for chunk in page.state_layout.chunks
            )
            return
        for start in range(0, page.layout.nbytes, self._range):
            yield start, min(start + self._range, page.layout.nbytes), 0

    def _acquire(self) -> Frame:
        frame = self._staging.acquire()
        assert frame is not None
        return frame

    def _read(
        self, page: Page, spill: Spill, start: int, stop: int, number: int, frame: Frame
    ) -> None:
        at, nbytes = spill_place(page, start, stop, number)
        pieces = [(at, frame.memory[:nbytes])]
        self._io.read(f"{page.layout.key}.grad.0", pieces, sums=list(spill.sums[start])).wait()


def _overlap(
    page: Page, param: int, grad: torch.Tensor, start: int, stop: int, frame: Frame
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the part of one parameter inside a range: as stored in `frame`, and in `grad`."""
    spec = page.layout.params[param]
    size = spec.dtype.itemsize
    first = max(0, (start - spec.offset) // size)
    last = min(spec.numel, (stop - spec.offset) // size)
    if first < last:
        yield stored_part(page, param, first, last, start, frame), flat(grad)[first:last]


def stored_part(
    page: Page, param: int, first: int, last: int, start: int, frame: Frame
) -> torch.Tensor:
    """Return elements of a gradient as they are stored in a range that begins at `start`."""
    spec = page.layout.params[param]
    size, dtype = spec.dtype.itemsize, spec.dtype
    at, nbytes = spec.offset + first * size - start, (last - first) * size
    if page.layout.spills_halves:
        at, nbytes, dtype = at // 2, nbytes // 2, page.layout.waits_as(spec)
    return frame.tensor[at : at + nbytes].view(dtype)
