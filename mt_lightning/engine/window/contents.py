"""Changes of plain containers, so that steps that run in turns do not see each other's.

A list that a step appends to gets what it appended wherever it is shown again, behind what others
have left there. So lists come out as if the steps had run one after the other.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

KINDS = (list, dict, set, deque, OrderedDict, defaultdict)
"""Types whose contents are followed; subclasses may forbid what is done here."""

_ABSENT = object()


class Contents:
    """A container and what it held at one moment.

    Args:
        container: The container.
        then: What it held, None for what it holds now.
    """

    def __init__(self, container: Any, then: Any = None) -> None:
        self._container = container
        self._then = container.copy() if then is None else then

    def changed(self) -> bool:
        """Return whether it holds other objects now."""
        now, then = self._container, self._then
        if len(now) != len(then):
            return True
        if isinstance(now, dict):
            return any(now.get(key, _ABSENT) is not value for key, value in then.items())
        if isinstance(now, set):
            return now != then
        return any(a is not b for a, b in zip(now, then, strict=True))

    def new_numbers(self) -> bool:
        """Return whether a number was put in the place of another one."""
        if not isinstance(self._then, dict):
            return False
        return any(
            is_number(value) and self._then.get(key, value) is not value
            for key, value in self._container.items()
        )

    def take(self) -> Callable[[], None]:
        """Put back what it held; return what repeats the change."""
        container, now, then = self._container, self._container.copy(), self._then
        _fill(container, then)
        if isinstance(now, dict):
            if all(key in now for key in then):
                new = {k: v for k, v in now.items() if then.get(k, _ABSENT) is not v}
                return lambda: container.update(new)
        elif isinstance(now, set):
            if then <= now:
                return lambda: container.update(now - then)
        else:
            items, old = list(now), list(then)
            if len(items) >= len(old) and all(a is b for a, b in zip(items, old, strict=False)):
                return lambda: container.extend(items[len(old) :])
        return lambda: _fill(container, now)


def is_number(value: Any) -> bool:
    """Return whether `value` could be a count."""
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _fill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(items)
