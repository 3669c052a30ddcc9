"""How many bytes a step holds while it waits: the tensors that its frames can reach.

Hidden states, masks, caches of keys and values, outputs kept for later: all of them are variables
of some function that has not returned. Weights are not counted, they have frames of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import CO_OPTIMIZED
from types import CodeType
from typing import Any

import torch
from torch import nn

_MOST_OBJECTS = 1 << 14
_DEEPEST = 6


class Holdings:
    """Counts bytes of tensors, each storage once.

    Args:
        opaque: Packages whose objects are not looked into: what they hold is not the step's.
    """

    def __init__(self, opaque: tuple[str, ...] = ()) -> None:
        self._opaque = {"builtins", "mt_lightning", "torch", *opaque}
        self.num_bytes = 0
        self._storages: set[int] = set()
        self._objects: set[int] = set()

    def add(self, value: Any, depth: int = 0) -> None:
        """Count what can be reached from `value`."""
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self._add_tensor(value)
            return
        known = id(value) in self._objects or len(self._objects) > _MOST_OBJECTS
        if known or depth > _DEEPEST or isinstance(value, (str, bytes, int, float, type)):
            return
        self._objects.add(id(value))
        if isinstance(value, Mapping):
            for item in list(value.values()):
                self.add(item, depth + 1)
        elif isinstance(value, (list, tuple, set)):
            for item in list(value):
                self.add(item, depth + 1)
        if type(value).__module__.partition(".")[0] in self._opaque or callable(value):
            return  # modules among them
        for item in list(getattr(value, "__dict__", {}).values()):
            self.add(item, depth + 1)

    def _add_tensor(self, value: torch.Tensor) -> None:
        try:
            storage = value.untyped_storage()
            address, num_bytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            return  # of a kind without a storage
        if address not in self._storages:
            self._storages.add(address)
            # A batch may be a view of the whole data set, a mask an expanded scalar.
            self.num_bytes += min(value.numel() * value.element_size(), num_bytes)


def held_bytes(outermost: CodeType, opaque: tuple[str, ...] = ()) -> int:
    """Return the bytes that the functions under way hold.

    Args:
        outermost: Code of the function at which to stop; its variables are not counted.
        opaque: Packages whose objects are not looked into.
    """
    holdings = Holdings(opaque)
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        variables = frame.f_locals
        for value in list(variables.values()):
            holdings.add(value)
        if type(variables) is dict and frame.f_code.co_flags & CO_OPTIMIZED:
            variables.clear()  # a copy, which would keep alive what the function lets go of
        frame = frame.f_back
    return holdings.num_bytes
