"""Takes a model's Python state and tensors back to what they were, so that steps can run again.

[Note: what can be taken back]
Everything that is reached from the modules through attributes, containers and ordinary objects:
values of attributes, contents of lists, dicts and sets, buffers and other tensors, arrays,
generators of random numbers. Tensors and arrays above 1 MiB are only watched: a step that changes
one cannot be run twice. Nor can one that may draw from an iterator. Objects of Lightning, of torch
(but modules) and of the standard library are left alone, as are globals and what lies outside the
process.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

SMALL_BYTES = 1 << 20
_MOST_ITEMS = 1 << 22
_FOREIGN = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "mt_lightning"}
_FOREIGN |= set(sys.stdlib_module_names) - {"collections", "types", "argparse"}
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_ABSENT = object()
Path = tuple[Any, str] | None
"""How something was reached: from where, and by what."""


class Snapshot:
    """The state of everything that some roots reach.

    Args:
        roots: Modules, dicts or lists, by name.
        params: Parameters whose values are kept too, where the others are not in memory.
        also: Another snapshot, whose objects are kept as well.

    Attributes:
        blocker: What cannot be taken back, as a sentence; empty where everything can.
        num_bytes: Bytes of the copies.
    """

    def __init__(
        self,
        roots: dict[str, Any],
        params: Iterable[nn.Parameter] = (),
        also: Snapshot | None = None,
    ) -> None:
        self.blocker = ""
        self.num_bytes = 0
        self._containers: list[tuple[Any, Any, Path]] = []
        self._slots: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor, Path]] = {}
        self._watched: list[tuple[torch.Tensor, int, Path]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray | int, Path]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._flags: list[tuple[nn.Parameter, bool]] = []
        self._seen: set[int] = set()
        todo: list[tuple[Any, Path]] = [(root, (None, name)) for name, root in roots.items()]
        if also is not None:
            todo += [(each, path) for each, _, path in also._containers]
            todo += [(tensor, path) for tensor, _, path in also._tensors.values()]
            todo += [(array, path) for array, _, path in also._arrays]
            todo += [(generator, None) for generator, _ in also._generators]
        num_items = 0
        while todo and not self.blocker:
            value, path = todo.pop()
            if type(value) in _LEAVES or isinstance(value, _CODE) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            num_items += 1
            if num_items > _MOST_ITEMS:
                self.blocker = "the modules hold too many objects to take them back"
            todo.extend((item, (path, key)) for item, key in self._take(value, path))
        for param in params:
            self._keep(param.data, None)

    def restore(self) -> None:
        """Set everything to what it was."""
        for container, contents, _ in self._containers:
            if not _same(container, contents):
                _fill(container, contents)
        for value, slots in self._slots:
            for name, item in slots.items():
                if getattr(value, name, _ABSENT) is not item:
                    object.__setattr__(value, name, item)
        # What was made under inference_mode can be written to there only.
        with torch.inference_mode():
            for tensor, copy, _ in self._tensors.values():
                if not _same_bits(tensor, copy):
                    tensor.copy_(copy)
        for array, copy, _ in self._arrays:
            if isinstance(copy, np.ndarray):
                array[...] = copy
        for generator, state in self._generators:
            _set_state(generator, state)
        for param, flag in self._flags:
            param.requires_grad_(flag)

    def changed(self) -> str:
        """Return the name of something large that has changed and was not kept; else nothing."""
        for tensor, version, path in self._watched:
            if tensor._version != version:
                return _name(path)
        for array, digest, path in self._arrays:
            if not isinstance(digest, np.ndarray) and _digest(array) != digest:
                return _name(path)
        return ""

    def difference(self) -> str:
        """Return the name of a tensor, a count or a list that is another now; else nothing.

        Numbers with a fraction are left out: they may be times.
        """
        for container, contents, path in self._containers:
            if isinstance(contents, dict):
                for key in [*contents, *(key for key in container if key not in contents)]:
                    if not self._alike(contents.get(key, _ABSENT), container.get(key, _ABSENT)):
                        return _name((path, str(key)))
            elif isinstance(contents, (list, deque)):
                if len(contents) != len(container):
                    return _name(path)
                for then, now in zip(contents, container, strict=True):
                    if not self._alike(then, now):
                        return _name(path)
        for tensor, copy, path in self._tensors.values():
            if path is not None and not _same_bits(tensor, copy):
                return _name(path)
        return ""

    def _alike(self, then: Any, now: Any) -> bool:
        if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor):
            kept = self._tensors.get(id(then))
            return _same_bits(kept[1] if kept is not None else then, now)
        if isinstance(then, int) and isinstance(now, int):
            return then == now
        if type(then) is list and type(now) is list and then is not now:
            return len(then) == len(now) and all(map(self._alike, then, now))
        # Hooks come and go under numbers that are never used twice.
        only = now if then is _ABSENT else then if now is _ABSENT else None
        return not isinstance(only, (torch.Tensor, int))

    def _take(self, value: Any, path: Path) -> Iterator[tuple[Any, str]]:
        """Keep one object; yield what it holds."""
        if isinstance(value, nn.Parameter):
            self._flags.append((value, value.requires_grad))
        elif isinstance(value, torch.Tensor):
            self._keep(value, path)
        elif isinstance(value, np.ndarray):
            self._keep_array(value, path)
        elif isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState)):
            self._generators.append((value, _get_state(value)))
        elif isinstance(value, random.Random):
            self._generators.append((value, value.getstate()))
        elif isinstance(value, (dict, list, set, deque, bytearray)):
            contents = _contents(value)
            self._containers.append((value, contents, path))
            if isinstance(value, dict):
                yield from ((item, f"{key}") for key, item in contents.items())
            elif not isinstance(value, bytearray):
                yield from ((item, "[]") for item in contents)
            yield from self._attributes(value, path)
        elif isinstance(value, (tuple, frozenset)):
            yield from ((item, "[]") for item in value)
        elif isinstance(value, nn.Module):
            yield from self._attributes(value, path)
        elif hasattr(type(value), "__next__"):
            self.blocker = f"{_name(path)} is an iterator, which a step may draw from"
        elif type(value).__module__.partition(".")[0] not in _FOREIGN:
            yield from self._attributes(value, path)

    def _attributes(self, value: Any, path: Path) -> Iterator[tuple[Any, str]]:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and attributes and id(attributes) not in self._seen:
            self._seen.add(id(attributes))
            self._containers.append((attributes, attributes.copy(), path))
            yield from ((item, name) for name, item in list(attributes.items()))
        slots = {
            name: getattr(value, name)
            for kind in type(value).__mro__
            for name in _slots_of(kind)
            if hasattr(value, name)
        }
        if slots:
            self._slots.append((value, slots))
            yield from ((item, name) for name, item in slots.items())

    def _keep(self, tensor: torch.Tensor, path: Path) -> None:
        plain = tensor.layout == torch.strided and not tensor.is_meta
        if plain and not tensor.numel():
            return
        num_bytes = tensor.numel() * tensor.element_size() if plain else 0
        overlaps = plain and torch._debug_has_internal_overlap(tensor) == 1  # type: ignore[attr-defined]
        if plain and num_bytes <= SMALL_BYTES and not overlaps:
            self._tensors[id(tensor)] = tensor, tensor.detach().clone(), path
            self.num_bytes += num_bytes
        elif not tensor.is_inference():
            self._watched.append((tensor, tensor._version, path))

    def _keep_array(self, array: np.ndarray, path: Path) -> None:
        if isinstance(array, np.memmap) or not array.flags.writeable or array.dtype.hasobject:
            return
        small = array.nbytes <= SMALL_BYTES
        self._arrays.append((array, array.copy() if small else _digest(array), path))
        self.num_bytes += array.nbytes if small else 0


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return list(value)
    return set(value) if isinstance(value, set) else value.copy()


def _same(container: Any, contents: Any) -> bool:
    """Compare by identity and order: items may be tensors."""
    if len(container) != len(contents):
        return False
    if isinstance(contents, (set, bytearray)):
        return container == contents
    if isinstance(contents, dict):
        pairs = zip(dict.items(container), contents.items(), strict=True)
        return all(now[1] is then[1] and now[0] == then[0] for now, then in pairs)
    return all(a is b for a, b in zip(container, contents, strict=True))


def _fill(container: Any, contents: Any) -> None:
    """Put contents back without asking what a class made of its own does with them."""
    if isinstance(container, dict):
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in contents.items():
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    elif isinstance(container, bytearray):
        container[:] = contents
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, contents)
    else:
        container.clear()
        container.extend(contents)


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in names if not name.startswith("__")]


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return a is b
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _digest(array: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).view(np.uint8).data)


def _name(path: Path) -> str:
    names: list[str] = []
    while path is not None:
        path, name = path
        if name not in ("_modules", "_buffers", "__dict__", ""):
            names.append(name)
    return ".".join(reversed(names))
