"""The update of one page, piece by piece, on the update worker.

[Note: an update in pieces]
For each chunk: its state comes from disk (or from RAM where it fits), the shadow optimizer steps
views of weights, gradients and state, and the state goes to the slot that the last commit does not
name. The next chunk is read while this one computes and the one before is written. The weights stay
whole in their frame and are written when the last chunk is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mt_lightning.engine.gradients import PageGrads, flat
from mt_lightning.engine.spill import Ring, Spiller
from mt_lightning.errors import StepError
from mt_lightning.optim.codec import RawCodec, StateCodec
from mt_lightning.optim.norm import Clip, all_finite
from mt_lightning.optim.shadow import Hyper, Shadow
from mt_lightning.pager.pool import PoolEntry
from mt_lightning.pager.stats import Clock, Stats
from mt_lightning.pages.state import Chunk, Segment
from mt_lightning.pages.table import Page, ParamState
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import IOQueue, Ticket
from mt_lightning.tiers.store import Store

_LARGEST_SMALL_NUMEL = 64


@dataclass
class PageUpdate:
    """Everything one page's update needs, fixed when it is submitted.

    Attributes:
        page: The page.
        entry: Its pinned weights.
        grads: Its gradient, owned by the update.
        groups: Param group of each parameter.
        shadow: Twin of the user's optimizer.
        hyper: Frozen hyper-parameters.
        clip: What clipping does.
    """

    page: Page
    entry: PoolEntry
    grads: PageGrads
    groups: list[int]
    shadow: Shadow
    hyper: Hyper
    clip: Clip


@dataclass
class SelfCheck:
    """What the first update of each parameter did.

    Attributes:
        got: Parameters that got a gradient.
        pushed: Parameters that got one that is not all zero.
        changed: Parameters that are different after it.
        nonfinite: Parameters that are not finite although their gradient was.
    """

    got: set[str] = field(default_factory=set)
    pushed: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    nonfinite: set[str] = field(default_factory=set)


@dataclass
class Loaded:
    """A chunk's state in RAM or on its way."""

    chunk: Chunk
    frame: Frame | None
    resident: bool
    read: Ticket | None


class Updater:
    """Runs updates and spills; every method is called from the update worker only."""

    def __init__(
        self,
        store: Store,
        io: IOQueue,
        stats: Stats,
        clock: Clock,
        ring: Ring,
        spiller: Spiller,
        resident: dict[tuple[int, int], Frame],
        checking: SelfCheck | None = None,
        codec: StateCodec | None = None,
    ) -> None:
        self._store = store
        self._io = io
        self._stats = stats
        self._clock = clock
        self._ring = ring
        self._spiller = spiller
        self._resident = resident
        self._codec = codec or RawCodec()
        self._valid: set[tuple[int, int]] = set()
        self.checking = checking
        self.touched: set[str] = set()

    def forget(self) -> None:
        """Distrust all state kept in RAM; it is read again."""
        self._valid.clear()

    def update(self, job: PageUpdate) -> None:
        """Step the optimizer on one page and write its planes."""
        page = job.page
        job.entry.wait()
        self._spiller.gather(page, job.grads)
        small = list(page.small)
        slot, state_sums = page.state.next_slot, []
        tickets: list[Ticket] = []
        if page.state.nbytes:
            self._prepare(f"{page.state.key}.{slot}", page.state.nbytes)
        chunks = page.state_layout.chunks
        ahead: Loaded | None = None
        for position, chunk in enumerate(chunks):
            loaded = ahead or self._load(page, chunk, wait=True)
            assert loaded is not None
            ahead = None
            if position + 1 < len(chunks):
                ahead = self._load(page, chunks[position + 1], wait=False)
            if loaded.read is not None:
                loaded.read.wait()
            with self._stats.timing("update_s", self._clock):
                self._step(job, loaded, small)
            ticket = self._store_chunk(page, slot, loaded)
            if ticket is not None:
                tickets.append(ticket)
            state_sums.append(ticket)
        job.grads.ram = [None] * len(job.grads.ram)
        weight_slot = page.weight.next_slot
        name = f"{page.weight.key}.{weight_slot}"
        self._prepare(name, page.weight.nbytes)
        written = self._io.write(name, [(0, job.entry.frame.memory)])
        for ticket in (*tickets, written):
            ticket.wait()
        page.weight.advance(weight_slot, [list(written.sums)])
        if page.state.nbytes:
            page.state.advance(slot, [list(t.sums) if t is not None else [] for t in state_sums])
        page.small = small
        page.version += 1

    def _load(self, page: Page, chunk: Chunk, *, wait: bool) -> Loaded | None:
        """Begin to bring a chunk's state; None when that would have to wait for a frame."""
        if not chunk.nbytes:
            return Loaded(chunk, None, resident=False, read=None)
        key = (page.index, chunk.index)
        frame = self._resident.get(key)
        resident = frame is not None
        if frame is None:
            frame = self._ring.acquire(wait=wait)
            if frame is None:
                return None
        elif key in self._valid:
            return Loaded(chunk, frame, resident=True, read=None)
        read = None
        if page.state.slot is not None and any(page.small[s.param].present for s in chunk.segments):
            pieces, at = [], 0
            for offset, length in chunk.pieces:
                pieces.append((offset, frame.memory[at : at + length]))
                at += length
            read = self._io.read(page.state.file, pieces, sums=list(page.state.sums[chunk.index]))
        return Loaded(chunk, frame, resident, read)

    def _store_chunk(self, page: Page, slot: int, loaded: Loaded) -> Ticket | None:
        chunk, frame = loaded.chunk, loaded.frame
        if frame is None:
            return None
        pieces, at = [], 0
        for offset, length in chunk.pieces:
            pieces.append((offset, frame.memory[at : at + length]))
            at += length
        ticket = self._io.write(f"{page.state.key}.{slot}", pieces)
        if loaded.resident:
            self._valid.add((page.index, chunk.index))
        else:
            self._ring.release(frame, ticket)
        return ticket

    def _step(self, job: PageUpdate, loaded: Loaded, small: list[ParamState]) -> None:
        page, chunk = job.page, loaded.chunk
        staged = self._spiller.stage(page, job.grads, chunk)
        params, groups, states, done = [], [], [], []
        grads: list[torch.Tensor] = []
        for segment in chunk.segments:
            grad = self._grad_of(job, segment, chunk, staged)
            if grad is None:
                continue
            spec, before = page.layout.params[segment.param], page.small[segment.param]
            plane = job.entry.frame.tensor
            if page.state_layout.sliced:
                param = spec.flat(plane)[segment.start : segment.stop]
            else:
                param = spec.view(plane)
            param.grad = grad
            tensors = self._state_views(page, segment, loaded.frame)
            params.append(param)
            grads.append(grad)
            groups.append(job.groups[segment.param])
            states.append(
                {
                    **{
                        k: v.clone() if isinstance(v, torch.Tensor) else v
                        for k, v in before.values.items()
                    },
                    **{key: tensors[key] for key in before.present},
                }
            )
            done.append((segment, tensors))
        if params:
            job.clip.apply(grads)
            olds = [p.clone() for p in params] if self.checking is not None else None
            after = job.shadow.step(job.hyper, params, groups, states)
            for (segment, tensors), state in zip(done, after, strict=True):
                small[segment.param] = _keep(page.layout.params[segment.param].name, state, tensors)
            if olds is not None:
                self._check(page, done, olds, params, grads)
        if staged is not None:
            self._spiller.release(staged)

    @staticmethod
    def _grad_of(
        job: PageUpdate, segment: Segment, chunk: Chunk, staged: Frame | None
    ) -> torch.Tensor | None:
        spec, grad = job.page.layout.params[segment.param], job.grads.ram[segment.param]
        if grad is not None:
            if not job.page.state_layout.sliced:
                return grad
            return flat(grad)[segment.start : segment.stop]
        if staged is None or segment.param not in job.grads.spill.present:
            return None
        size = spec.dtype.itemsize
        at = spec.offset + segment.start * size - chunk.start
        return staged.tensor[at : at + (segment.stop - segment.start) * size].view(spec.dtype)

    def _state_views(
        self, page: Page, segment: Segment, frame: Frame | None
    ) -> dict[str, torch.Tensor]:
        views = {}
        for key, dtype, shape, at in segment.tensors:
            assert frame is not None
            numel = segment.stop - segment.start if shape is None else torch.Size(shape).numel()
            stored = frame.tensor[at : at + self._codec.encoded_bytes(numel, dtype)]
            values = self._codec.decode(stored, dtype)
            if shape is not None:
                spec = page.layout.params[segment.param]
                alike = shape == spec.shape and spec.dense
                values = values.as_strided(shape, spec.stride) if alike else values.view(shape)
            views[key] = values
        return views

    def _check(
        self,
        page: Page,
        done: list[tuple[Segment, dict[str, torch.Tensor]]],
        olds: list[torch.Tensor],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        assert self.checking is not None
        for (segment, _), old, param, grad in zip(done, olds, params, grads, strict=True):
            name = page.layout.params[segment.param].name
            self.checking.got.add(name)
            if bool(grad.any()):
                self.checking.pushed.add(name)
            if not torch.equal(old, param):
                self.checking.changed.add(name)
            if not all_finite(param) and all_finite(grad):
                self.checking.nonfinite.add(name)

    def _prepare(self, name: str, nbytes: int) -> None:
        self._store.prepare_write(name, nbytes)
        self.touched.add(name)


def _keep(name: str, state: dict[str, object], tensors: dict[str, torch.Tensor]) -> ParamState:
    """Split a parameter's new state into what lies in the frame and what is small."""
    present, values = [], {}
    for key, value in state.items():
        target = tensors.get(key)
        if target is not None and isinstance(value, torch.Tensor):
            if value.data_ptr() != target.data_ptr():
                target.copy_(value.view_as(target))
            present.append(key)
        elif isinstance(value, torch.Tensor) and value.numel() > _LARGEST_SMALL_NUMEL:
            raise StepError(
                f"the optimizer began to keep {key!r} ({value.numel()} values) for {name}, for "
                f"which no "
                "room was laid out at start. Set the hyper-parameter that needs it from the "
                "beginning."
            )
        else:
            values[key] = value
    return ParamState(tuple(present), values)
