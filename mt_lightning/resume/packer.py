"""The state of a run as bytes that are read without running anybody's code."""

from __future__ import annotations

import io
import logging
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from mt_lightning.errors import CorruptPageError

log = logging.getLogger(__name__)

VERSION = 1
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype)


class Packer:
    """Turns states of runs into bytes that `torch.load(weights_only=True)` reads.

    What it would not read is left out where a run can do without (callbacks); else the run has no
    state, and cannot be resumed. Either is said once.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def pack(self, state: dict[str, Any]) -> bytes | None:
        """Return the state as bytes, None where nobody could read them."""
        plain: dict[str, Any] = {}
        for name, value in state.items():
            try:
                plain[name] = self._callbacks(value) if name == "callbacks" else _plain(value)
            except _UnreadableError as error:
                self._tell(
                    f"the state of this run's {name.replace('_', ' ')} holds a {error}: the run "
                    "cannot be resumed from its commits. Keep to tensors and plain values in "
                    "state_dict()."
                )
                return None
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        return buffer.getvalue()

    def _callbacks(self, states: dict[str, Any]) -> dict[str, Any]:
        readable = {}
        for key, value in states.items():
            try:
                readable[key] = _plain(value)
            except _UnreadableError as error:
                self._tell(
                    f"the state of callback {key} holds a {error}, not only tensors and plain "
                    "values: a run that is resumed starts the callback anew."
                )
        return readable

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", what)


class _UnreadableError(TypeError):
    pass


def _plain(value: Any) -> Any:
    """Return `value` with numpy's numbers as Python's, which schedules often make.

    Raises:
        _UnreadableError: It holds something else than tensors and plain values.
    """
    if isinstance(value, np.generic):
        return value.item()
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((_plain(k), _plain(v)) for k, v in value.items())
    if kind in (list, tuple, set):
        return kind(_plain(item) for item in value)
    if kind is torch.nn.Parameter:
        return value.detach()
    if kind in _LEAVES:
        return value
    raise _UnreadableError(f"{kind.__module__}.{kind.__qualname__}")


def unpack(data: bytes) -> dict[str, Any]:
    """Return what `Packer.pack` was given.

    Raises:
        CorruptPageError: The bytes are not what this version wrote.
    """
    try:
        state = torch.load(io.BytesIO(data), weights_only=True)
        version = state["version"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError) as error:
        raise CorruptPageError(None, f"the state of the run cannot be read: {error}") from error
    if version != VERSION:
        raise CorruptPageError(
            None, f"the state of the run has version {version}; this release reads {VERSION}"
        )
    return state
