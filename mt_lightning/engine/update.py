"""The update of one page, piece by piece, on the update worker.

[Note: an update in pieces]
For each chunk: its state comes from disk (or from RAM where it fits), the shadow optimizer steps
views of weights, gradients and state, and the state goes to the slot that the last commit does not
name. The next chunk is read while this one computes and the one before is written; the first one is
read while the gradients are still computed, where frames are to spare. The weights stay whole in
their frame and are written behind the chunks. The next page does not wait for the last bytes of
this one: its chunks take the frames of the ring as those are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mt_lightning.engine.build import Members
from mt_lightning.engine.ending import Ending
from mt_lightning.engine.gradients import PageGrads, flat
from mt_lightning.engine.masters.halves import Half
from mt_lightning.engine.small_state import small_values, take_small
from mt_lightning.engine.spill import Spiller, stored_part
from mt_lightning.engine.state_stream import Loaded, StateStream, Stored, settle
from mt_lightning.engine.trained import Trained
from mt_lightning.engine.weight_writer import WeightWriter
from mt_lightning.optim.norm import Clip, all_finite
from mt_lightning.optim.shadow import Hyper, Target
from mt_lightning.optim.team import alone
from mt_lightning.pager.pool import PoolEntry
from mt_lightning.pages.state import MASTER_REST, Chunk, Segment
from mt_lightning.pages.table import Page, ParamState
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.spans import Span
from mt_lightning.tiers.store import Store


@dataclass
class PageUpdate:
    """Everything one page's update needs, fixed when it is submitted.

    Attributes:
        page: The page.
        entry: Its pinned weights.
        grads: Its gradient, owned by the update.
        members: The page's parameters and their places in the optimizer.
        trained: The optimizer.
        hyper: Frozen hyper-parameters.
        clip: What clipping does.
        plane: The weights on the device, where they are updated there.
        unwritten: By parameter, 1 where its weights are what the last update left, else 0: then its
            master has no rest any more. Parameters that nobody else writes to are not named.
    """

    page: Page
    entry: PoolEntry
    grads: PageGrads
    members: Members
    trained: Trained
    hyper: Hyper
    clip: Clip
    plane: torch.Tensor | None = None
    unwritten: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def weights(self) -> torch.Tensor:
        """What is stepped, `[nbytes]` uint8."""
        return self.entry.frame.tensor if self.plane is None else self.plane


@dataclass(frozen=True)
class Preloaded:
    """The first chunk of state of a page that will be updated.

    Attributes:
        page: The page's number.
        step: The step whose update will use it.
        slot: The slot that it comes from.
        loaded: The chunk.
    """

    page: int
    step: int
    slot: int | None
    loaded: Loaded


@dataclass
class Due:
    """An update that waits for its page's next forward."""

    grads: PageGrads
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


class Updater:
    """Runs updates and spills; every method is called from the update worker only."""

    def __init__(
        self,
        store: Store,
        io: IOQueue,
        stream: StateStream,
        spiller: Spiller,
        checking: SelfCheck | None = None,
        *,
        keeps_weights: bool = False,
        inline: bool = False,
    ) -> None:
        self._store = store
        self._io = io
        self._stream = stream
        self._spiller = spiller
        self.checking = checking
        self._keeps_weights = keeps_weights
        self._inline = inline
        self.coming: tuple[Page, int] | None = None
        """A page whose gradients are computed now, and a number of the step that will update it;
        set by the training thread."""
        self._preloaded: Preloaded | None = None
        self.touched: set[str] = set()

    def forget(self) -> None:
        """Distrust all state kept in RAM; it is read again."""
        self.coming = None
        self._drop_preloaded()
        self._stream.forget()

    def preload(self) -> None:
        """Begin to read the first chunk of state of the page that comes next.

        One chunk waits at a time, until its update: else it would be read twice.
        """
        waits, coming = self._preloaded, self.coming
        if coming is None or (waits is not None and waits.step == coming[1]):
            return
        self._drop_preloaded()
        page, step = coming
        chunks = page.state_layout.chunks
        if not chunks or not chunks[0].nbytes or not self._stream.reads_ahead:
            return
        loaded = self._stream.load(page, chunks[0], wait=False)
        if loaded is not None:
            self.coming = None
            self._preloaded = Preloaded(page.index, step, page.state.slot, loaded)

    def _drop_preloaded(self) -> None:
        preloaded, self._preloaded = self._preloaded, None
        if preloaded is not None:
            self._stream.give_up(preloaded.loaded)

    def _take_preloaded(self, page: Page) -> Loaded | None:
        """Return the first chunk of `page` where it was preloaded and has not changed since."""
        preloaded = self._preloaded
        if preloaded is None or preloaded.page != page.index:
            return None
        if preloaded.slot != page.state.slot:
            self._drop_preloaded()
            return None
        self._preloaded = None
        return preloaded.loaded

    def _end_preload(self, page: Page) -> None:
        """Wait until nobody reads a file that is about to be made ready for writing."""
        preloaded = self._preloaded
        if preloaded is not None and preloaded.page == page.index:
            finished = preloaded.loaded.read
            if finished is not None:
                finished.wait()

    def update(self, job: PageUpdate) -> Ending:
        """Step the optimizer on one page and begin to write those of its planes that leave RAM.

        Returns:
            What waits for the writes, and makes what was written the current slots of the page.
        """
        free = not self._inline and job.trained.stepper.is_free(job.hyper)
        with alone() if free else contextlib.nullcontext():
            return self._update(job)

    def _update(self, job: PageUpdate) -> Ending:
        page, stream = job.page, self._stream
        job.entry.wait()
        self._spiller.gather(page, job.grads)
        small = list(page.small)
        slot = page.state.next_slot
        stored: list[Stored] = []
        self._end_preload(page)
        if self.coming is not None and self.coming[0] is page:
            self.coming = None
        writes_state = page.state.nbytes > 0 and stream.writes(page)
        if writes_state:
            # A second step before a commit goes over what the first one wrote, chunk by chunk.
            again = page.state.slot == slot
            self._prepare(f"{page.state.key}.{slot}", page.state.nbytes, keep=again)
        weight_slot = page.weight.next_slot
        weights = None if self._keeps_weights else self._weight_writer(job)
        try:
            self._step_chunks(job, slot, small, stored, weights)
            self.preload()
            if weights is not None:
                weights.finish()
        except BaseException:
            # What is read or written now must not be in the way of what takes its place.
            settle([*(weights.tickets if weights is not None else ()), *(s.ticket for s in stored)])
            raise

        def written() -> None:
            if weights is not None:
                page.weight.advance(weight_slot, [weights.sums])
            if writes_state:
                lengths = [s.length for s in stored] if page.state_layout.slots else []
                page.state.advance(slot, [s.sums for s in stored], lengths)
            job.entry.dirty |= weights is None and job.plane is None
            page.small = small
            page.version += 1

        tickets = weights.tickets if weights is not None else []
        return Ending([*tickets, *(s.ticket for s in stored)], written)

    def _step_chunks(
        self,
        job: PageUpdate,
        slot: int,
        small: list[ParamState],
        stored: list[Stored],
        weights: WeightWriter | None,
    ) -> None:
        page, stream = job.page, self._stream
        chunks = page.state_layout.chunks
        in_order = page.state_layout.sliced and not page.state_layout.formats
        ahead = self._take_preloaded(page)
        for position, chunk in enumerate(chunks):
            loaded = ahead or stream.load(page, chunk, wait=True)
            assert loaded is not None
            ahead = None
            # The one frame that inline updates have is for the chunk at hand.
            if position + 1 < len(chunks) and not self._inline:
                ahead = stream.load(page, chunks[position + 1], wait=False)
            if loaded.read is not None:
                loaded.read.wait()
            stream.finish(page, loaded, job.trained.codec)
            with Span("step optimizer", page.layout.key):
                self._step(job, loaded, small)
            name = f"{page.state.key}.{slot}"
            stored.append(stream.store(page, name, loaded, job.trained.codec))
            if weights is not None and in_order:
                weights.final(chunk.stop)
        job.grads.ram = [None] * len(job.grads.ram)

    def _weight_writer(self, job: PageUpdate) -> WeightWriter:
        plane = job.page.weight
        name = f"{plane.key}.{plane.next_slot}"
        self._prepare(name, plane.nbytes)
        return WeightWriter(self._io, name, job.entry.frame, first=self._inline)

    def _step(self, job: PageUpdate, loaded: Loaded, small: list[ParamState]) -> None:
        page, chunk = job.page, loaded.chunk
        packed = bool(page.state_layout.formats)
        staged = self._spiller.stage(page, job.grads, chunk)
        targets: list[Target] = []
        halves: list[Half] = []
        done: list[tuple[Segment, dict[str, torch.Tensor]]] = []
        for segment in chunk.segments:
            grad = self._grad_of(job, segment, chunk, staged)
            if grad is None:
                continue
            spec, before = page.layout.params[segment.param], page.small[segment.param]
            plane, group = job.weights, job.members.groups[segment.param]
            if page.state_layout.sliced:
                param = spec.flat(plane)[segment.start : segment.stop]
            else:
                param = spec.view(plane)
            tensors = self._state_views(page, segment, loaded.memory, before)
            if MASTER_REST in tensors:
                halves.append(Half(param, tensors.pop(MASTER_REST)))
                if segment.param in job.unwritten:
                    halves[-1].rest.mul_(job.unwritten[segment.param])
                param = halves[-1].master()
            grad = grad.to(param.dtype)
            state = {
                **small_values(before, job.hyper.groups[group], plane.device),
                **{key: tensors[key] for key in before.present if key != MASTER_REST},
            }
            if packed:
                state = {**state, **tensors}
            position = job.members.positions[segment.param]
            targets.append(Target(param, grad, group, state, position, segment.start))
            done.append((segment, tensors))
        if targets:
            job.clip.apply([target.grad for target in targets])
            olds = [t.param.clone() for t in targets] if self.checking is not None else None
            after = job.trained.stepper.step(job.hyper, targets)
            for half, target in zip(halves, targets, strict=bool(halves)):
                half.take(target.param)
            for (segment, tensors), state in zip(done, after, strict=True):
                kept = take_small(page.layout.params[segment.param].name, state, tensors)
                if halves:
                    kept = ParamState((*kept.present, MASTER_REST), kept.values)
                small[segment.param] = kept
            if olds is not None:
                self._check(page, done, olds, targets)
        if staged is not None:
            self._spiller.release(staged)

    @staticmethod
    def _grad_of(
        job: PageUpdate, segment: Segment, chunk: Chunk, staged: Frame | None
    ) -> torch.Tensor | None:
        grad = job.grads.ram[segment.param]
        if grad is not None:
            if not job.page.state_layout.sliced:
                return grad
            return flat(grad)[segment.start : segment.stop]
        if staged is None or segment.param not in job.grads.spill.present:
            return None
        return stored_part(
            job.page, segment.param, segment.start, segment.stop, chunk.start, staged
        )

    @staticmethod
    def _state_views(
        page: Page, segment: Segment, memory: torch.Tensor | None, before: ParamState
    ) -> dict[str, torch.Tensor]:
        views = {}
        for part in segment.parts:
            assert memory is not None
            values = part.of(memory)
            if page.state_layout.formats and part.key not in before.present:
                values.zero_()
            if part.shape is not None:
                spec = page.layout.params[segment.param]
                alike = part.shape == spec.shape and spec.dense
                shape = part.shape
                values = values.as_strided(shape, spec.stride) if alike else values.view(shape)
            views[part.key] = values
        return views

    def _check(
        self,
        page: Page,
        done: list[tuple[Segment, dict[str, torch.Tensor]]],
        olds: list[torch.Tensor],
        targets: list[Target],
    ) -> None:
        assert self.checking is not None
        for (segment, _), old, target in zip(done, olds, targets, strict=True):
            name = page.layout.params[segment.param].name
            param, grad = target.param, target.grad
            self.checking.got.add(name)
            if bool(grad.any()):
                self.checking.pushed.add(name)
            if not torch.equal(old, param):
                self.checking.changed.add(name)
            if not all_finite(param) and all_finite(grad):
                self.checking.nonfinite.add(name)

    def _prepare(self, name: str, nbytes: int, *, keep: bool = False) -> None:
        self._store.prepare_write(name, nbytes, keep=keep)
        self.touched.add(name)
