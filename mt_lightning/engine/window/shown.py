"""What the steps of one loop have shown: bytes held, random draws, metrics, numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from mt_lightning.engine.window.draws import NOTHING, Draws

_MOST_SHAPES = 1 << 8


class Shown:
    """Watches steps and expects the next ones to be alike.

    Attributes:
        steady: Whether they draw as many random numbers as those before them.
        updates: How often a step updates each metric, by position.
        carried: Numbers that steps change in a unit or after one; see `StepState`.
    """

    def __init__(self) -> None:
        self.steady = True
        self.updates: Counter[int] = Counter()
        self.carried: set[str] = set()
        self._steps: dict[Any, tuple[Draws | None, int]] = {}
        """Draws and bytes held of the last step with such shapes."""
        self._ratio = 0.0

    def saw(self, shapes: Any, num_bytes: int, draws: Draws | None) -> None:
        """Take note of a step.

        Args:
            shapes: Those of what its first unit received.
            num_bytes: The most bytes that it held between two units.
            draws: How many random numbers it drew, None where nobody can say.
        """
        if len(self._steps) >= _MOST_SHAPES and shapes not in self._steps:
            del self._steps[next(iter(self._steps))]
        self._steps[shapes] = (draws, num_bytes)
        self._ratio = max(self._ratio, num_bytes / max(1, _numel(shapes)))

    def draws(self, shapes: Any) -> Draws | None:
        """Return how many random numbers such a step is expected to draw, None if unknown.

        [Note: draws of a new shape]
        Sampling draws for each row and token, however long the prompt is. So a step of a new shape
        is expected to draw what all steps have drawn. That is given up at the first surprise: steps
        whose streams overlap would be less random than they look.
        """
        counts = {draws for draws, _ in self._steps.values()}
        if counts <= {NOTHING}:
            return NOTHING
        if not self.steady:
            return None
        if shapes in self._steps:
            return self._steps[shapes][0]
        return counts.pop() if len(counts) == 1 else None

    def knows(self, shapes: Any) -> bool:
        """Return whether such a step was seen."""
        return shapes in self._steps

    def num_bytes(self, shapes: Any) -> int:
        """Return how many bytes it is expected to hold.

        Of a new shape: in proportion to its size, and as many as the next larger one. Part of what
        a step holds (the tokens that it generates) does not shrink with the prompt.
        """
        if shapes in self._steps:
            return self._steps[shapes][1]
        numel = _numel(shapes)
        larger = (held for other, (_, held) in self._steps.items() if _numel(other) >= numel)
        return max(int(self._ratio * numel), min(larger, default=0))

    @property
    def most_bytes(self) -> int:
        """The most bytes that a step has held, 0 where none was seen."""
        return max((num_bytes for _, num_bytes in self._steps.values()), default=0)


def _numel(shapes: Any) -> int:
    return max((torch.Size(shape).numel() for shape in shapes or ()), default=0)
