"""Find weights that were read where they are not in memory, by looking at the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from mt_lightning.engine.build import Build
from mt_lightning.engine.units import Unit


def next_sequence_number() -> int:
    """Return the number that the next autograd node made by this thread will get."""
    return _get_sequence_nr()


class Usage:
    """Knows which autograd nodes were made inside which unit.

    A node that leads straight to a paged parameter read it when the node was made. Unless that was
    inside an execution of a unit that holds the parameter, it read a placeholder.
    """

    def __init__(self, build: Build) -> None:
        resident = set(build.resident)
        self._holders: dict[int, tuple[str, tuple[str, ...]]] = {
            id(param): (spec.name, page.layout.units)
            for page in build.table
            if page.index not in resident
            for param, spec in zip(
                build.members[page.index].params, page.layout.params, strict=True
            )
        }
        self._ranges: list[tuple[int, int, str]] = []

    def executed(self, unit: Unit, start: int, stop: int) -> None:
        """Note the sequence numbers of the nodes that one execution made."""
        self._ranges.append((start, stop, unit.name))

    def clear(self) -> None:
        """Forget all executions."""
        self._ranges.clear()

    def read_outside(self, loss: torch.Tensor) -> Iterator[str]:
        """Yield the names of paged parameters that `loss` depends on through a placeholder."""
        seen: set[Any] = set()
        nodes = [loss.grad_fn] if loss.grad_fn is not None else []
        while nodes:
            node = nodes.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                place = self._holders.get(id(getattr(following, "variable", None)))
                if place is not None and not self._inside(node, place[1]):
                    yield place[0]
                if following not in seen:
                    seen.add(following)
                    nodes.append(following)

    def _inside(self, node: Any, units: tuple[str, ...]) -> bool:
        number = node._sequence_nr()
        return any(a <= number < b and unit in units for a, b, unit in self._ranges)
