"""Plain attributes of modules, as each micro-batch left them.

[Note: state that spans units]
A step may set a flag before its first unit and clear it after the last one, keep a shape for a
later layer, or stash a loss on a module and collect it in the end. In turns with other steps it
must find its own. So what a step has set is its own until it ends, and then everybody's. Counts go
on from step to step: a number, or a tensor without history, that a unit sets on its own modules is
everybody's at once, and one set before the first unit is seen by the steps that begin later.
What is changed in place (a list that is appended to) is shared, as in the usual order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ABSENT = object()
_INTERNAL = ("_parameters", "_buffers", "_modules")
Own = dict[tuple[int, str], Any]
"""Values by the position of the module and the name."""


class Attributes:
    """The attributes of some modules.

    Args:
        modules: All modules.
        units: The modules of each unit.
    """

    def __init__(self, modules: list[nn.Module], units: list[list[nn.Module]]) -> None:
        self._dicts = [module.__dict__ for module in modules]
        places = {id(module): place for place, module in enumerate(modules)}
        self._members = [{places[id(module)] for module in unit} for unit in units]

    def show(self, own: Own) -> list[dict[str, Any]]:
        """Set what a step has set before; return how everything was."""
        before = [attributes.copy() for attributes in self._dicts]
        for (place, name), value in own.items():
            self._set(place, name, value)
        return before

    def hide(
        self, own: Own, before: list[dict[str, Any]], unit: int | None, *, ended: bool
    ) -> None:
        """Take what a step has set, and put back what was there.

        Args:
            own: Where to keep it.
            before: What `show` returned.
            unit: Index of the unit that it ran last, None where it has not run any.
            ended: Whether the step has ended, so that what it set stays.
        """
        if ended:
            own.clear()
            return
        members = self._members[unit] if unit is not None else set()
        for place, (now, then) in enumerate(zip(self._dicts, before, strict=True)):
            if list(map(id, now.values())) == list(map(id, then.values())):
                continue
            for name in {**then, **now}:
                value, old = now.get(name, ABSENT), then.get(name, ABSENT)
                if name in _INTERNAL or value is old:
                    continue
                if _counts(value) and place in members:
                    continue
                own[place, name] = value
                if not (_counts(value) and unit is None):
                    self._set(place, name, old)

    def _set(self, place: int, name: str, value: Any) -> None:
        if value is ABSENT:
            self._dicts[place].pop(name, None)
        else:
            self._dicts[place][name] = value


def _counts(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)
