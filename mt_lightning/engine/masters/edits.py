"""Weights that are written to from outside: as fp32 masters, of which both halves are kept.

[Note: what is shown]
While `load_state_dict` writes to a page, its parameters show fp32 masters, so that nothing of an
fp32 checkpoint is lost. They are split once another page is written to, or before anybody uses the
page: its weights go to their frame, the rests to the state plane. Parameters that stay in RAM show
their bfloat16 weights at all times, and user code may write to these too: what is then not what the
last update left has no rest any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from mt_lightning.engine.masters.halves import (
    fill_rest,
    rest_parts,
    whole_masters,
    write_weight,
)
from mt_lightning.engine.masters.seen import bytes_of
from mt_lightning.engine.runtime import Runtime
from mt_lightning.engine.state_chunks import StateChunks
from mt_lightning.optim.masters import REST_DTYPE, join
from mt_lightning.pager.budget import Reservation
from mt_lightning.pager.pool import PoolEntry
from mt_lightning.pages.state import Chunk
from mt_lightning.pages.table import Page, ParamState
from mt_lightning.tiers.arena import Frame

Sources = Mapping[int, torch.Tensor | None]
"""By parameter of a page, what its rest is made of; see `fill_rest`."""


class MasterEdits:
    """Writes masters of an attached engine; called from the thread that trains.

    Args:
        run: The parts of the engine.
        chunks: Gives what rewrites the state plane of a page.
    """

    def __init__(self, run: Runtime, chunks: Callable[[Page], StateChunks]) -> None:
        self._run = run
        self._chunks = chunks
        self._held: dict[int, tuple[list[torch.Tensor], Reservation]] = {}
        self._open: Counter[int] = Counter()
        self._seen = run.seen

    # -- pages that are written to ----------------------------------------------------------------
    def begin(self, page: Page, dtypes: list[torch.dtype] | None = None) -> None:
        """Let the parameters of `page` show its masters.

        Args:
            page: The page; it has masters, and no update of it is pending.
            dtypes: What each parameter shows, float32 by default where it has a master.
        """
        self._open[page.index] += 1
        if page.index not in self._held:
            self.settle()
            self._held[page.index] = self._masters_of(page, dtypes or self.dtypes(page))
        members = self._run.build.members[page.index]
        for param, master in zip(members.params, self._held[page.index][0], strict=True):
            param.data = master

    def end(self, page: Page) -> None:
        """Take note that nobody writes to `page` any more."""
        self._open[page.index] -= 1
        if self._open[page.index]:
            return
        del self._open[page.index]
        if page in self._seen:
            self.settle()
        self._run.binder.blank(page)

    def settle(self) -> None:
        """Split all masters that were shown and are shown no longer."""
        for index in [i for i in self._held if i not in self._open]:
            page = self._run.build.table[index]
            masters, reservation = self._held.pop(index)
            self._split(page, masters)
            self.rewrite(page, dict(enumerate(masters)))
            # Both halves are named by the same commit.
            self._run.writer.flush()
            self._run.writer.dirty = True
            del masters
            reservation.free()

    def _split(self, page: Page, masters: list[torch.Tensor]) -> None:
        stays = page in self._seen
        frame = self._resident_frame(page) if stays else self._run.writer.open(page).frame
        with torch.no_grad():
            for spec, master in zip(page.layout.params, masters, strict=True):
                write_weight(spec, frame.tensor, master)
        if stays:
            entry = self._run.pool.entry(page)
            assert entry is not None
            entry.dirty = True
            self._run.pool.changed(page)
            self._seen.take(page, self._shown(page))
        else:
            self._run.writer.close(page)

    def rewrite(self, page: Page, sources: Sources) -> None:
        """Write the rests of some parameters of `page`; the others keep theirs."""

        def change(chunk: Chunk, frame: Frame) -> None:
            for segment, part in rest_parts(chunk):
                if segment.param in sources:
                    spec = page.layout.params[segment.param]
                    fill_rest(frame, spec, segment, part, sources[segment.param])

        touched = self._chunks(page).rewrite(page, change, keeps=True)
        self._run.updaters[0].touched.add(touched)
        keys = page.state_layout.rest_params
        page.small = [
            ParamState(tuple(dict.fromkeys((*s.present, *keys.get(i, ())))), s.values)
            for i, s in enumerate(page.small)
        ]
        for updater in self._run.updaters:
            updater.forget()

    def rests(self, page: Page) -> list[torch.Tensor | None]:
        """Return the rest of each parameter, in RAM; None where there is none."""
        specs, known = page.layout.params, page.state_layout.rest_params
        rests: list[torch.Tensor | None] = [None] * len(specs)
        for i in known:
            rests[i] = torch.zeros(specs[i].numel, dtype=REST_DTYPE)
        if page.state.slot is not None:
            for chunk, frame in self._chunks(page).read(page):
                for segment, part in rest_parts(chunk):
                    rest = rests[segment.param]
                    assert rest is not None
                    rest[segment.start : segment.stop] = part.of(frame.tensor)
        return rests

    def _masters_of(
        self, page: Page, dtypes: list[torch.dtype]
    ) -> tuple[list[torch.Tensor], Reservation]:
        run = self._run
        pairs = zip(dtypes, page.layout.params, strict=True)
        nbytes = sum(dtype.itemsize * spec.numel for dtype, spec in pairs)
        entry = run.pool.open(page)
        entry.wait()
        what = f"the fp32 masters of page {page.layout.key} ({', '.join(page.layout.units)})"
        reservation = run.pool.reserve(nbytes, "masters", what)
        masters = self.values(page, entry, dtypes)
        run.pool.release(entry)
        return masters, reservation

    def values(
        self, page: Page, entry: PoolEntry, dtypes: list[torch.dtype] | None = None
    ) -> list[torch.Tensor]:
        """Return copies of the parameters of a page in RAM, as fp32 masters where they have any."""
        specs = page.layout.params
        copies = whole_masters(dtypes or self.dtypes(page), specs)
        rests = self.rests(page) if page.state_layout.has_masters else [None] * len(specs)
        with torch.no_grad():
            for spec, master, rest in zip(specs, copies, rests, strict=True):
                weight = spec.view(entry.frame.tensor)
                if rest is None or master.dtype != torch.float32:
                    master.copy_(weight)
                else:
                    join(weight, rest.as_strided(master.shape, master.stride()), master)
        return copies

    def dtypes(self, page: Page) -> list[torch.dtype]:
        """Return what each parameter of `page` shows while it is written to."""
        has = page.state_layout.rest_params
        return [
            torch.float32 if i in has else spec.dtype for i, spec in enumerate(page.layout.params)
        ]

    # -- pages that stay in RAM -------------------------------------------------------------------
    def watch(self, page: Page) -> None:
        """Remember the weights of a page that stays in RAM, as they belong to their rests."""
        if page.state_layout.has_masters:
            self._seen.watch(page, self._shown(page))

    def watch_again(self) -> None:
        """Remember them anew: they are those of the last commit."""
        for index, _ in self._seen:
            page = self._run.build.table[index]
            self._seen.take(page, self._shown(page))

    def before_step(self) -> None:
        """Drop the rests of parameters that user code has written to; see `seen` for a device."""
        if self._run.device_state is None:
            self.find_writes()

    def after_step(self) -> None:
        """Remember what an update has made."""
        if self._run.device_state is None:
            self.watch_again()

    def find_writes(self) -> None:
        """Drop the rests of parameters that user code has written to; no update is pending."""
        for index, seen in self._seen:
            page = self._run.build.table[index]
            self._run.pool.changes(page)
            now, before = self._resident_frame(page).tensor, self._run.planes.on_host(seen)
            if torch.equal(before, now):
                continue
            written: dict[int, torch.Tensor | None] = {
                i: None
                for i in page.state_layout.rest_params
                if not torch.equal(bytes_of(page, i, before), bytes_of(page, i, now))
            }
            self._seen.take(page, self._shown(page))
            if written:
                self._run.steps.drain()
                self.rewrite(page, written)

    def _shown(self, page: Page) -> torch.Tensor:
        """Return what updates change: the plane on a device where they run there."""
        run = self._run
        there = run.device_state is not None
        return run.planes.plane(page) if there else self._resident_frame(page).tensor

    def _resident_frame(self, page: Page) -> Frame:
        entry = self._run.pool.entry(page)
        assert entry is not None
        return entry.frame
