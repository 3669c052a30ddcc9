"""A window: the micro-batches of one step, run together, one unit at a time.

[Note: layer-major order]
Every micro-batch is an ordinary step in a greenlet that stops at the entry of each unit. When all
have stopped, the unit that comes first is bound once and run for each of them; then the next. One
backward over everything follows. Autograd runs younger nodes first, so it goes through the units in
reverse, and through the micro-batches of each unit in reverse too. Weights are thus read twice per
step, however many micro-batches it has.

[Note: the order within a unit]
The last micro-batch runs first: backward then meets the first one first, and gradients are added up
as in the usual order. In the last unit, whose micro-batches are differentiated at once, the first
one runs first. So does it in units that change buffers, whose running means would else differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mt_lightning.engine.units import Unit
from mt_lightning.engine.window.attributes import Attributes
from mt_lightning.engine.window.draws import (
    NOTHING,
    advance,
    count_draws,
    give_generators,
    same_generators,
    take_generators,
)
from mt_lightning.engine.window.learned import Inputs, Learned, shapes_of
from mt_lightning.engine.window.micro import Micro, View, current
from mt_lightning.engine.window.sums import WindowSums, largest_param_bytes
from mt_lightning.engine.window.tail import whole
from mt_lightning.tiers.ledger import COMPUTE, PAGING
from mt_lightning.tiers.spans import Span

if TYPE_CHECKING:
    from mt_lightning.engine.attached import Attached


class Window:
    """Runs micro-batches unit by unit on an attached engine.

    Args:
        host: The attached engine.
        root: The model.

    Attributes:
        learned: What steps have shown of themselves.
        micros: The micro-batches that were started and have not been run to their end.
        unit: The unit that is bound for all of them.
        num_other_draws: Micro-batches that began at another random number than in the usual order.
    """

    def __init__(self, host: Attached, root: nn.Module) -> None:
        self._host = host
        self._run = host.run
        self._device = host.device
        self.learned = Learned()
        self.micros: list[Micro] = []
        self.num_other_draws = 0
        self.comparing = False
        """Whether gradients of the coming step wait to be compared, and no page may change."""
        self.unit: Unit | None = None
        self._sums: WindowSums | None = None
        self._counters: dict[Micro, Inputs] = {}
        self._num_started = 0
        self._attributes = Attributes(
            list(root.modules()),
            [list(unit.module.modules()) for unit in self._run.build.units],
        )

    # -- what the engine asks ---------------------------------------------------------------------

    @property
    def sums(self) -> WindowSums | None:
        """Where gradients go while a group runs, None between groups."""
        return self._sums

    def arrive(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let a micro-batch wait at the entry of a unit; return the arguments it goes on with."""
        micro = current()
        if micro is None:
            if torch._C._current_graph_task_id() == -1:
                self.learned.visit(unit, args, kwargs)
            return args, kwargs
        # Inside a backward of its own, or under inference mode, it cannot stop.
        if torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled():
            return args, kwargs
        return micro.arrive(unit, args, kwargs)

    def enter_again(self, unit: Unit, *, backward: bool) -> None:
        """Let another micro-batch run in a unit that is bound."""
        assert self._sums is not None
        for index in unit.pages:
            page = self._run.build.table[index]
            if backward:
                self._sums.expect(page)
            else:
                self._run.binder.renew(page)

    def executed(self, unit: Unit, start: int, *, counted: bool) -> None:
        """Take note of an execution; `counted` says whether it changed buffers."""
        if self._sums is not None:
            self._sums.executed(unit, start)
        if counted:
            self.learned.counted.add(unit.index)

    def passed(self, start: int) -> None:
        """Let go of what only younger nodes than number `start` need; called in backward."""
        if self._sums is not None:
            self._sums.passed(start)

    # -- what the loop asks -----------------------------------------------------------------------

    def start(self, step: Callable[[], Any], view: View) -> Micro:
        """Start a step and let it run to the entry of its first unit.

        The generators of random numbers are left where the step is expected to leave it.
        """
        micro = Micro(self._num_started, step, view, self._attributes, self._device)
        self._num_started += 1
        self.micros.append(micro)
        before = micro.rng
        with self._mended():
            self._go_on(micro)
        if micro.ended:
            give_generators(self._device, micro.rng)
        else:
            self._place(micro)
            micro.shapes = shapes_of(*micro.arguments)
            expected = advance(before, self.learned.draws(micro.shapes))
            give_generators(self._device, expected)
        micro.rng_before, micro.rng_after = before, take_generators(self._device)
        return micro

    def num_input_bytes(self) -> int:
        """Return how many bytes the units of all started steps are expected to receive."""
        return sum(self.learned.num_bytes(micro.shapes) for micro in self.micros if micro.shapes)

    def run(
        self,
        num_micros: int | None,
        on_loss: Callable[[Micro], torch.Tensor | None],
        sums: WindowSums | None = None,
    ) -> list[Micro]:
        """Run the oldest started steps to their end, and backward through all of them.

        Args:
            num_micros: How many, None for all.
            on_loss: Called with each step that has ended; returns the loss to differentiate and
                keeps nothing of its graph.
            sums: Takes the gradients, None where the coming step is to use them.

        Returns:
            The steps.
        """
        group = self.micros[:num_micros]
        collecting = gc.isenabled()
        # Hundreds of suspended frames would be searched again and again.
        gc.disable()
        try:
            with self._mended(), torch.enable_grad():
                self._sums = sums or WindowSums(self._run)
                transient = largest_param_bytes(self._run.build.table)
                what = "the gradient of a parameter beside the sum of those before it,"
                beside = self._run.pool.reserve(transient, "gradients", what)
                there = self._run.planes.reserve(transient, "gradients", what)
                between = self._run.inputs.reserve_between(self._between_bytes(len(group)))
                try:
                    self._forward(group, on_loss)
                    self._backward(group)
                    self._sums.finish()
                finally:
                    for room in (beside, there, between):
                        if room is not None:
                            room.free()
                self._sums = None
                self._run.steps.submit_ready()
        finally:
            if collecting:
                gc.enable()
        self._settle_draws(group)
        self._end()
        del self.micros[: len(group)]
        return group

    def abandon(self) -> None:
        """End all started steps where they stand and forget them."""
        self._sums, self.unit = None, None
        micros, self.micros = self.micros, []
        for micro in micros:
            with Span("abandon", account=PAGING):  # whose account its `finally` blocks would change
                micro.kill()
        self._end()
        self._run.inputs.sweep()

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _mended(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def _end(self) -> None:
        self._counters.clear()

    def _forward(self, group: list[Micro], on_loss: Callable[[Micro], torch.Tensor | None]) -> None:
        for micro in group:
            if micro.ended:
                self._finish(micro, on_loss)
        while waiting := [micro for micro in group if micro.unit is not None]:
            first = min(waiting, key=_place_of)
            together = [micro for micro in waiting if _place_of(micro) == _place_of(first)]
            unit, last = first.unit, first.position >= self.learned.last
            assert unit is not None
            if not last and unit.index not in self.learned.counted:
                together.reverse()
            self._host.enter(unit, backward=False)
            self.unit = unit
            try:
                for micro in together:
                    self._count(micro)
                    self._go_on(micro, cutting=last)
                    if micro.ended:
                        self._finish(micro, on_loss)
                    else:
                        self._place(micro)
            finally:
                self.unit = None
                self._host.leave(unit, backward=False)

    def _place(self, micro: Micro) -> None:
        assert micro.unit is not None
        micro.position, is_new = self.learned.place(micro.unit.index, micro.position)
        for other in self.micros if is_new else ():
            if other is not micro and other.position >= micro.position:
                other.position += 1

    def _finish(self, micro: Micro, on_loss: Callable[[Micro], torch.Tensor | None]) -> None:
        loss = on_loss(micro)
        if loss is None:
            return
        if not loss.requires_grad:
            torch.autograd.backward(loss)  # says what is wrong
        entry, micro.entry = micro.entry, None
        assert self._sums is not None
        self._sums.owner = micro.number
        micro.roots = whole(loss) if entry is None else entry.differentiate(loss)

    def _backward(self, group: list[Micro]) -> None:
        edges, grads = [], []
        for micro in group:
            edges += [edge for edge, _ in micro.roots]
            grads += [grad for _, grad in micro.roots]
            micro.roots = []
        if edges:
            with Span("backward", account=COMPUTE):
                torch.autograd.backward(edges, grads)

    def _go_on(self, micro: Micro, *, cutting: bool = False) -> None:
        """Let a step go on; gradients of resident parameters will tell whose they are."""
        build, accumulators = self._run.build, []
        for index in build.resident:
            self._run.binder.renew(build.table[index])
            for param in build.members[index].params:
                if param.requires_grad:
                    node = torch.autograd.graph.get_gradient_edge(param).node
                    node.register_prehook(partial(self._meet, micro.number))
                    accumulators.append(node)
        with Span("micro-batch", str(micro.number), COMPUTE):
            micro.go_on(cutting=cutting)
        # Autograd knows them weakly; by now those that were used are in the graph.
        accumulators.clear()

    def _meet(self, number: int, grads: Any) -> None:
        if self._sums is not None:
            self._sums.owner = number

    def _count(self, micro: Micro) -> None:
        self._counters.setdefault(micro, Inputs()).add(*micro.arguments)

    def _between_bytes(self, num_micros: int) -> int:
        """What steps hold between two units: an input each, and in backward its gradient."""
        return 2 * num_micros * self.learned.widest_bytes if num_micros > 1 else 0

    def _settle_draws(self, group: list[Micro]) -> None:
        """See whether every step drew as many numbers as expected."""
        for micro in group:
            as_expected = same_generators(micro.rng, micro.rng_after)
            counter = self._counters.get(micro)
            draws = self.learned.draws(micro.shapes) if micro.shapes is not None else NOTHING
            if not as_expected:
                draws = count_draws(micro.rng_before, micro.rng)
                now = take_generators(self._device)
                if micro is self.micros[-1] and same_generators(now, micro.rng_after):
                    give_generators(self._device, micro.rng)
                else:
                    self.num_other_draws += 1
            if counter is not None:
                self.learned.saw(micro.shapes, micro.visited, counter, draws)


def _place_of(micro: Micro) -> tuple[int, int]:
    assert micro.unit is not None
    return micro.position, micro.unit.index
