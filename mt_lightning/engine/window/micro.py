"""One micro-batch: an ordinary step that stops wherever it is about to enter a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from mt_lightning.engine.units import Unit
from mt_lightning.engine.window.attributes import Attributes, Own
from mt_lightning.engine.window.draws import Generators
from mt_lightning.engine.window.tail import Entry, Root
from mt_lightning.engine.window.thread_state import ThreadState


class View(Protocol):
    """What else code outside torch must find as it left it."""

    def enter(self) -> None:
        """Show the micro-batch its own view."""

    def leave(self) -> None:
        """Keep it, and show what was there before."""


class Micro(greenlet):
    """A step under way.

    Args:
        number: Its place among the steps.
        step: Runs the step and returns its result.
        view: What is swapped beside torch's own state.
        attributes: The attributes of all modules.
        device: Where the model computes.

    Attributes:
        unit: The unit it waits to enter, None while it runs and when it has ended.
        visited: Units entered so far, by index.
        position: Where it is in the learned order.
        result: What `step` returned.
        shapes: Those of what its first unit received.
        rng_before: The generators of random numbers when it began.
        rng_after: What they were expected to be when it ended.
        entry: Where its last unit begins, None where that is not known.
        roots: Where its backward begins.
    """

    def __init__(
        self,
        number: int,
        step: Callable[[], Any],
        view: View,
        attributes: Attributes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.number = number
        self._attributes = attributes
        self._own: Own = {}
        self._step = step
        self._view = view
        self._device = device
        self._state = ThreadState.copy(device)
        self.unit: Unit | None = None
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.visited: list[int] = []
        self.position = -1
        self.result: Any = None
        self.ended = False
        self.shapes: Any = None
        self.rng_before = self.rng_after = self._state.rng
        self.entry: Entry | None = None
        self.roots: list[Root] = []
        self._cutting = False

    @property
    def rng(self) -> Generators:
        """Its generators of random numbers, while it does not run."""
        return self._state.rng

    def run(self) -> None:  # type: ignore[override]
        """Run the step; called by greenlet."""
        self.result = self._step()
        self.ended = True

    def go_on(self, *, cutting: bool = False) -> None:
        """Let it run until it is about to enter the next unit, or ends.

        Args:
            cutting: Whether the unit that it enters now is expected to be its last.
        """
        self._cutting = cutting
        self._swapped(self.switch)

    def kill(self) -> None:
        """End it where it stands; its `finally` blocks run."""
        if not self.ended and not self.dead and self:
            self._swapped(lambda: self.throw(GreenletExit))
        self.arguments, self.roots, self.result = ((), {}), [], None

    def _swapped(self, run: Callable[[], Any]) -> None:
        main = ThreadState.take(self._device)
        self._state.give()
        self._view.enter()
        unit, self.unit = self.unit, None
        before = self._attributes.show(self._own)
        try:
            run()
        finally:
            ran = unit.index if unit is not None else None
            self._attributes.hide(self._own, before, ran, ended=self.ended)
            self._view.leave()
            self._state = ThreadState.take(self._device)
            main.give()

    def arrive(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wait at the entry of a unit; called inside the greenlet."""
        self.unit, self.arguments = unit, (args, kwargs)
        assert self.parent is not None
        self.parent.switch()
        self.arguments = ((), {})
        self.visited.append(unit.index)
        self.entry = None
        if self._cutting and torch.is_grad_enabled():
            self.entry = Entry(args, kwargs)
            args, kwargs = self.entry.args, self.entry.kwargs
            self.entry.args, self.entry.kwargs = (), {}
        return args, kwargs


def current() -> Micro | None:
    """Return the micro-batch that runs now, None outside of all."""
    now = getcurrent()
    return now if isinstance(now, Micro) else None
