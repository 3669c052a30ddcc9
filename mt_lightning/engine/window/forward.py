"""Steps without a backward that run together: validation and prediction, one unit at a time.

[Note: which unit comes next]
The one that the step which is furthest behind waits for; all steps that wait for it run then, in
the order of their batches. No gradients are added up, so steps may take any way through the model:
they meet again at the next unit that they share. Generation goes through the model once per token;
steps that need fewer tokens end earlier.

[Note: the order of ends]
A step ends when all steps before it have ended: what the loop does after it (logs, hooks, results)
comes in the order of batches. Steps that enter the same units end in this order by themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mt_lightning.engine.units import Unit
from mt_lightning.engine.window.draws import (
    NOTHING,
    Generators,
    advance,
    count_draws,
    give_generators,
    same_generators,
    take_generators,
)
from mt_lightning.engine.window.learned import shapes_of
from mt_lightning.engine.window.micro import Micro, View, current
from mt_lightning.engine.window.shown import Shown
from mt_lightning.engine.window.step_state import StepState
from mt_lightning.engine.window.waiting import held_bytes
from mt_lightning.pager.budget import Reservation

if TYPE_CHECKING:
    from mt_lightning.engine.attached import Attached


class Step(Micro):
    """A step without a backward.

    Attributes:
        waits: While it waits for something else than a unit: returns whether it may go on.
        held_bytes: The most bytes that it has held while it waited, where they are counted.
        failure: What it raised.
    """

    def __init__(
        self,
        number: int,
        step: Callable[[], Any],
        view: View,
        state: StepState,
        device: torch.device,
    ) -> None:
        super().__init__(number, step, view, state, device)
        self.view = view
        self.waits: Callable[[], bool] | None = None
        self.counting: tuple[str, ...] | None = None
        """Packages not to look into where what it holds is counted, None where it is not."""
        self.held_bytes = 0
        self.room: Reservation | None = None
        self.failure: Exception | None = None
        self._ran: Unit | None = None

    def arrive(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wait at the entry of a unit."""
        if self.counting is not None:
            num_bytes = held_bytes(Step.run.__code__, self.counting)
            self.held_bytes = max(self.held_bytes, num_bytes)
        arguments = super().arrive(unit, args, kwargs)
        self._ran = unit
        return arguments

    def pause(self, waits: Callable[[], bool]) -> None:
        """Wait until `waits` returns True; called inside the step."""
        # What it does next follows the unit that it ran last.
        self.unit, self.waits = self._ran, waits
        assert self.parent is not None
        self.parent.switch()

    def let_go(self) -> None:
        """Give back the room that was reserved for what it holds."""
        if self.room is not None:
            self.room.free()
            self.room = None


class ForwardWindow:
    """Runs steps unit by unit on an attached engine.

    Args:
        host: The attached engine.
        state: What steps find on modules.
        learned: What steps have shown of themselves before.
        opaque: Packages whose objects hold nothing of a step.

    Attributes:
        unit: The unit that is bound for all steps.
        sums: None: there are no gradients to add up.
        comparing: False: nothing is run twice.
        steps: The steps that were started and have not been run to their end, in order.
        num_other_draws: Steps that began at another random number than in the usual order.
        num_late: Steps that ended before a step of an earlier batch, and waited for it.
        num_groups_of_many: How often several steps have run together.
        uncounted_bytes: The most bytes that steps held above what was reserved for them.
    """

    sums = None
    comparing = False

    def __init__(
        self, host: Attached, state: StepState, learned: Shown, opaque: tuple[str, ...] = ()
    ) -> None:
        self._host = host
        self._state = state
        self._opaque = opaque
        self.learned = learned
        self.unit: Unit | None = None
        self.steps: list[Step] = []
        self.num_other_draws = self.num_late = self.uncounted_bytes = 0
        self.num_groups_of_many = 0
        self._num_started = 0
        self._watch: Callable[[Unit], None] = lambda unit: None

    # -- what the engine asks ---------------------------------------------------------------------

    def arrive(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let a step wait at the entry of a unit; return the arguments it goes on with."""
        self._watch(unit)
        step = current()
        # Inside a backward of its own it cannot stop.
        if step is None or torch._C._current_graph_task_id() != -1:
            return args, kwargs
        return step.arrive(unit, args, kwargs)

    def enter_again(self, unit: Unit, *, backward: bool) -> None:
        """Let another step run in a unit that is bound."""

    def executed(self, unit: Unit, start: int, *, counted: bool) -> None:
        """Take note of an execution with a graph."""

    def passed(self, start: int) -> None:
        """Take note that a backward has come to node number `start`."""

    def num_input_bytes(self) -> int:
        """Return how many bytes of inputs wait for a backward: none."""
        return 0

    # -- what the loop asks -----------------------------------------------------------------------

    def watch(self, watch: Callable[[Unit], None]) -> None:
        """Call `watch` whenever a step enters a unit."""
        self._watch = watch

    def start(self, run: Callable[[], Any], view: View, *, count: bool) -> Step:
        """Start a step and let it run to the entry of its first unit.

        The generators of random numbers are left where the step is expected to leave it.

        Args:
            run: Runs the step.
            view: What is swapped beside torch's own state.
            count: Whether to count what it holds.
        """
        self._state.refresh()
        step = Step(self._num_started, run, view, self._state, self._host.device)
        self._num_started += 1
        self.steps.append(step)
        step.counting = self._opaque if count else None
        before = step.rng
        self._go_on(step)
        if not step.ended and step.unit is not None:
            step.shapes = shapes_of(*step.arguments)
            if not self.learned.knows(step.shapes):
                step.counting = self._opaque
            self._give(advance(before, self.learned.draws(step.shapes)))
        else:
            self._give(step.rng)
        step.rng_before, step.rng_after = before, take_generators(self._host.device)
        return step

    def run(self, num_steps: int | None = None) -> None:
        """Run the oldest started steps to their end.

        An error in one of them is raised when those before it have ended; those after it are ended
        where they stand.

        Args:
            num_steps: How many, None for all.
        """
        group = self.steps[:num_steps]
        self.num_groups_of_many += len(group) > 1
        with self._mended():
            self._run(group)
            failed = next((step for step in group if step.failure is not None), None)
            if failed is not None and failed.failure is not None:
                raise failed.failure
        self._settle(group)
        del self.steps[: len(group)]

    def is_turn(self, step: Step) -> bool:
        """Return whether all steps before this one have ended."""
        for other in self.steps:
            if other is step:
                return True
            if not other.ended:
                return False
        return True

    def before(self, step: Step) -> list[Step]:
        """Return the steps of earlier batches that have not ended."""
        numbers = [each for each in self.steps if not each.ended]
        return [each for each in numbers if each.number < step.number]

    def await_turn(self, step: Step, failure: Exception | None = None) -> None:
        """Let a step wait until all steps before it have ended; called inside the step.

        Args:
            step: The step.
            failure: What it has raised; the steps after it are then ended where they stand.
        """
        step.failure = failure
        if not self.is_turn(step):
            self.num_late += failure is None
            step.pause(lambda: self.is_turn(step))

    def abandon(self) -> None:
        """End all started steps where they stand and forget them."""
        self.unit = None
        steps, self.steps = self.steps, []
        for step in steps:
            step.kill()
            step.let_go()

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _mended(self) -> Iterator[None]:
        # Hundreds of suspended frames would be searched again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            if collecting:
                gc.enable()

    def _run(self, group: list[Step]) -> None:
        while True:
            # Those after one that failed are gone.
            group = [step for step in group if step in self.steps]
            ready = next((step for step in group if step.waits is not None and step.waits()), None)
            if ready is not None:
                self._go_on(ready)
                continue
            waiting = [step for step in group if step.unit is not None and step.waits is None]
            if not waiting:
                stuck = [step for step in group if step.waits is not None]
                assert not stuck, [step.number for step in stuck]
                return
            self._run_unit(waiting)

    def _run_unit(self, waiting: list[Step]) -> None:
        unit = min(waiting, key=_behind).unit
        assert unit is not None
        self._host.enter(unit, backward=False)
        self.unit = unit
        try:
            for step in waiting:
                if step.unit is unit and step.waits is None and step in self.steps:
                    self._go_on(step)
        finally:
            self.unit = None
            self._host.leave(unit, backward=False)

    def _go_on(self, step: Step) -> None:
        step.waits = None
        step.go_on()
        if step.failure is not None:
            while self.steps[-1] is not step:
                later = self.steps.pop()
                later.kill()
                later.let_go()
        if step.room is not None and step.held_bytes > step.room.nbytes:
            self.uncounted_bytes = max(self.uncounted_bytes, step.held_bytes - step.room.nbytes)
        if step.ended:
            step.let_go()

    def _give(self, state: Generators) -> None:
        give_generators(self._host.device, state)

    def _settle(self, group: list[Step]) -> None:
        """See whether every step drew as many random numbers as expected."""
        for step in group:
            draws = self.learned.draws(step.shapes) if step.shapes is not None else NOTHING
            if not same_generators(step.rng, step.rng_after):
                draws = count_draws(step.rng_before, step.rng)
                now = take_generators(self._host.device)
                if step is self.steps[-1] and same_generators(now, step.rng_after):
                    self._give(step.rng)
                else:
                    self.num_other_draws += 1
                    self.learned.steady = False
            if step.shapes is not None:
                expected = self.learned.num_bytes(step.shapes)
                num_bytes = expected if step.counting is None else step.held_bytes
                self.learned.saw(step.shapes, num_bytes, draws)


def _behind(step: Step) -> tuple[int, int]:
    assert step.unit is not None
    return len(step.visited), step.unit.index
