"""What steps have shown of themselves: the order of units, the size of inputs, random draws."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mt_lightning.engine.inputs.tensors import is_parameter, num_bytes
from mt_lightning.engine.units import Unit
from mt_lightning.engine.window.draws import NOTHING, Draws

_MOST_SHAPES = 1 << 8
_LONGEST = 1 << 14
"""Steps that never repeat their order would make it longer and longer."""


class Learned:
    """Watches steps and expects the next ones to be alike; a wrong guess costs time only."""

    def __init__(self) -> None:
        self.order: list[int] = []
        """The units of all steps in one order, by index."""
        self.counted: set[int] = set()
        """Units that change buffers, by index."""
        self.widest_bytes = 0
        """The most that one unit has received."""
        self._steps: dict[Any, tuple[Draws | None, int]] = {}
        """Draws and bytes of inputs of the last step with such shapes."""
        self._ratio = 0.0
        self._visited: list[int] = []
        self._shapes: Any = None
        self._inputs: Inputs | None = None
        """Of the step that is watched; None while there is none."""

    def begin(self) -> None:
        """A step begins that runs in one go."""
        self._visited, self._shapes, self._inputs = [], None, Inputs()

    def visit(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step enters a unit; one that nobody watches is not followed."""
        if self._inputs is None:
            return
        if not self._visited:
            self._shapes = shapes_of(args, kwargs)
        self._visited.append(unit.index)
        self._inputs.add(args, kwargs)

    def end(self, draws: Draws | None) -> None:
        """It ended, having drawn that many random numbers."""
        assert self._inputs is not None
        self.saw(self._shapes, self._visited, self._inputs, draws)
        self._visited, self._shapes, self._inputs = [], None, None

    def saw(self, shapes: Any, visited: list[int], inputs: Inputs, draws: Draws | None) -> None:
        """Take note of a step.

        Args:
            shapes: Those of what its first unit received.
            visited: Units in the order they were entered, by index.
            inputs: What all its units received.
            draws: How many random numbers it drew, None where nobody can say.
        """
        if len(self._steps) >= _MOST_SHAPES and shapes not in self._steps:
            del self._steps[next(iter(self._steps))]
        num_bytes = inputs.num_bytes
        self.widest_bytes = max(self.widest_bytes, inputs.widest_bytes)
        self._steps[shapes] = (draws, num_bytes)
        self._ratio = max(self._ratio, num_bytes / max(1, _numel(shapes)))
        position = -1
        for unit in visited:
            position, _ = self.place(unit, position)

    def draws(self, shapes: Any) -> Draws | None:
        """Return how many random numbers such a step is expected to draw."""
        if shapes in self._steps:
            return self._steps[shapes][0]
        return NOTHING if all(draws == NOTHING for draws, _ in self._steps.values()) else None

    def num_bytes(self, shapes: Any) -> int:
        """Return how many bytes its units are expected to receive."""
        known = self._steps.get(shapes)
        return known[1] if known is not None else int(self._ratio * _numel(shapes))

    @property
    def random(self) -> bool:
        """Whether any step has drawn random numbers, or may have."""
        return any(draws != NOTHING for draws, _ in self._steps.values())

    @property
    def most_bytes(self) -> int:
        """The most bytes that the units of one step have received."""
        return max((num_bytes for _, num_bytes in self._steps.values()), default=0)

    def state(self) -> dict[str, Any]:
        """Return everything as plain values, for a run that goes on."""
        steps = [[shapes, *step] for shapes, step in self._steps.items()]
        counted = sorted(self.counted)
        return {
            "order": self.order,
            "counted": counted,
            "steps": steps,
            "ratio": self._ratio,
            "widest": self.widest_bytes,
        }

    def give(self, state: dict[str, Any]) -> None:
        """Take in what `state` returned."""
        self.order, self.counted = list(state["order"]), set(state["counted"])
        self._steps = {
            _shapes(shapes): (_draws(draws), num_bytes)
            for shapes, draws, num_bytes in state["steps"]
        }
        self._ratio = state["ratio"]
        # Runs of before this was counted are taken to have one unit that receives everything.
        self.widest_bytes = state.get("widest", self.most_bytes)

    def place(self, unit: int, after: int) -> tuple[int, bool]:
        """Return where in the order a step is that enters a unit, having been at `after`.

        A unit that was not expected there is put there: what follows moves on by one.

        Returns:
            The position, and whether the unit was put there.
        """
        if unit in self.order[after + 1 :]:
            return self.order.index(unit, after + 1), False
        if len(self.order) > _LONGEST:
            return after + 1, False
        self.order.insert(after + 1, unit)
        return after + 1, True

    @property
    def last(self) -> int:
        """The position of the last unit."""
        return len(self.order) - 1


class Inputs:
    """Counts bytes of tensors, each storage once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.widest_bytes = 0
        """The most that came at once."""
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the bytes of storages that were not seen before."""
        before = self.num_bytes
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and not is_parameter(value):
                if value.layout is not torch.strided:
                    continue
                storage = value.untyped_storage()
                known = self._seen.get(storage.data_ptr(), _nobody)()
                # An address is used again once the tensor that had it has gone to disk.
                if known is None or known.untyped_storage().data_ptr() != storage.data_ptr():
                    self._seen[storage.data_ptr()] = weakref.ref(value)
                    self.num_bytes += num_bytes(value)
        added = self.num_bytes - before
        self.widest_bytes = max(self.widest_bytes, added)
        return added


def _nobody() -> None:
    return None


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the shapes of all tensors in the arguments of a unit."""
    leaves = tree_leaves((args, kwargs))
    return tuple(tuple(value.shape) for value in leaves if isinstance(value, torch.Tensor))


def _shapes(kept: Any) -> Any:
    return None if kept is None else tuple(tuple(shape) for shape in kept)


def _draws(kept: Any) -> Draws | None:
    # Runs of before devices were counted have one number.
    return (kept, 0) if isinstance(kept, int) else None if kept is None else tuple(kept)


def _numel(shapes: Any) -> int:
    return max((torch.Size(shape).numel() for shape in shapes or ()), default=0)
