"""What steps without a backward find on modules: attributes, contents of lists, buffers replaced.

[Note: state of steps that only run forward]
What a step has set is its own until it ends, as in `attributes`. Nothing has a history here, so a
tensor that a unit leaves on itself is taken for a result of this step (an attention map, a loss of
a router), not for a count. A number may be either: the step that set it finds it again, and steps
that have not set it yet find it too, as they would after this step. Lists and dictionaries of
modules are followed as well, and hooks that a step registers. Buffers that are changed in place are
everybody's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import is_
from typing import Any

from torch import nn

from mt_lightning.engine.window.attributes import ABSENT, Attributes, Own
from mt_lightning.engine.window.contents import KINDS, Contents, is_number

_HOOKS = "its hooks"
_PLAIN = frozenset(vars(nn.Module()))


class _Before(list[dict[str, Any]]):
    contents: dict[tuple[int, str], Contents]


class StepState(Attributes):
    """The state of the modules of one model.

    Args:
        root: The model.
        units: The modules of each unit.
        shared: Modules whose state is everybody's: metrics.

    Attributes:
        carried: Numbers that steps changed in a unit or after one, by name: if a step begins with
            what the one before it has left there, it must not run beside it.
    """

    def __init__(
        self, root: nn.Module, units: list[list[nn.Module]], shared: Collection[nn.Module]
    ) -> None:
        apart = {id(module) for module in shared}
        named = [(name, m) for name, m in root.named_modules() if id(m) not in apart]
        super().__init__(
            [module for _, module in named],
            [[module for module in unit if id(module) not in apart] for unit in units],
        )
        self._names = [name for name, _ in named]
        self._types = [type(module) for _, module in named]
        self._hooks = [
            hooks for _, m in named for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._containers: list[tuple[int, str]] = []
        self.carried: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Look at what is everybody's; called when no step runs."""
        self._everybodys = [attributes.copy() for attributes in self._dicts]
        self._keep_hooks()
        self._containers = [
            (place, name)
            for place, attributes in enumerate(self._dicts)
            for name, value in attributes.items()
            if type(value) in KINDS and (name not in _PLAIN or (name == "_buffers" and value))
        ]

    def _keep_hooks(self) -> None:
        self._usual_hooks = [hooks.copy() for hooks in self._hooks]
        self._num_hooks = list(map(len, self._hooks))

    def show(self, own: Own) -> list[dict[str, Any]]:
        """Set what a step has set before; return how everything was."""
        before = _Before(self._everybodys)
        before.contents = {}
        for place, name in self._containers:
            value = self._dicts[place].get(name)
            if type(value) in KINDS:
                before.contents[place, name] = Contents(value)
        for (place, name), value in own.items():
            if place < 0:
                value()
            else:
                self._set(place, name, value)
        return before

    def hide(
        self, own: Own, before: list[dict[str, Any]], unit: int | None, *, ended: bool
    ) -> None:
        """Take what a step has set, and put back what was there; see `Attributes.hide`."""
        assert isinstance(before, _Before)
        if ended:
            own.clear()
            for place, _, _ in self._changes():
                self._everybodys[place] = self._dicts[place].copy()
            if self._num_hooks != list(map(len, self._hooks)):
                self._keep_hooks()
            return
        self._hide_hooks(own)
        for (place, name), contents in before.contents.items():
            known = own.pop((~place, name), None) is not None
            if contents.changed():
                if unit is not None and not known and contents.new_numbers():
                    self._note(place, name)
                own[~place, name] = contents.take()
        for place, name in own:
            if place >= 0:
                own[place, name] = self._dicts[place].get(name, ABSENT)
        for place, now, then in self._changes():
            for name in {**then, **now}:
                value, old = now.get(name, ABSENT), then.get(name, ABSENT)
                if value is old:
                    continue
                own[place, name] = value
                if not is_number(value):
                    self._set(place, name, old)
                    continue
                known = getattr(self._types[place], name, None) if old is ABSENT else old
                if unit is not None and is_number(known):
                    self._note(place, name)
                then[name] = value

    def _changes(self) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield the attributes of modules that differ from what is everybody's."""
        for place, (now, then) in enumerate(zip(self._dicts, self._everybodys, strict=True)):
            # There are hundreds of modules, and this is done at every unit for every step.
            if len(now) != len(then) or not all(map(is_, now.values(), then.values())):
                yield place, now, then

    def _hide_hooks(self, own: Own) -> None:
        """Take the hooks that a step has registered or removed, as for the time of its pass."""
        counts = list(map(len, self._hooks))
        if counts == self._num_hooks and not any(name == _HOOKS for _, name in own):
            return
        for place, (hooks, now) in enumerate(zip(self._hooks, counts, strict=True)):
            own.pop((~place, _HOOKS), None)
            if now != self._num_hooks[place]:
                own[~place, _HOOKS] = Contents(hooks, self._usual_hooks[place]).take()

    def _note(self, place: int, name: str) -> None:
        self.carried.add(f"{self._names[place]}.{name}".lstrip("."))
