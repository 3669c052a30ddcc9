"""What torch keeps for the thread and code expects to find as it left it.

Greenlets share one thread. Whatever a micro-batch sets between two units (grad mode, autocast, a
saved-tensor hook, a random number drawn) must be there when it goes on, and must not be seen by the
others. Context variables need no care: every greenlet has its own.

[Note: streams]
A step may compute on a stream of its own. Units wait for their weights on the stream that was
current when they were bound, so at each switch the stream that goes on waits for the one before it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import overrides
from torch._C import _autograd  # type: ignore[attr-defined]
from torch.utils import _python_dispatch

from mt_lightning.engine.on_device import current_stream, set_stream
from mt_lightning.engine.window.draws import give_generators, take_generators

_DEVICES = ("cpu", "cuda")
_CPU = torch.device("cpu")


class ThreadState:
    """The state of the thread at one moment, to be given back later.

    Args:
        device: Where the model computes.

    [Note: inference mode]
    It can only be set by a context, which puts everything back as it found it. `give` enters one
    where the state differs, and the `take` that follows leaves it.
    """

    _entered: ClassVar[torch.inference_mode | None] = None

    def __init__(self, device: torch.device = _CPU) -> None:
        self._device = device
        self.rng = take_generators(device)
        self._stream = current_stream(device)
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._dtype = torch.get_default_dtype()
        self._autocast = _autocast(device)
        self._cache = torch.is_autocast_cache_enabled()
        # There is no way to read the depth but to change it.
        self._depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        self._hooks = _take_saved_tensor_hooks()
        self._dispatch = _take(_python_dispatch._pop_mode, torch._C._len_torch_dispatch_stack)
        self._functions = _take(overrides._pop_mode, torch._C._len_torch_function_stack)
        entered, ThreadState._entered = ThreadState._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)

    @classmethod
    def take(cls, device: torch.device = _CPU) -> ThreadState:
        """Return the state and leave the thread without modes and hooks."""
        return cls(device)

    def give(self) -> None:
        """Set the thread to this state; it has neither modes nor hooks."""
        if self._inference != torch.is_inference_mode_enabled():
            ThreadState._entered = entered = torch.inference_mode(self._inference)
            entered.__enter__()
        for mode in self._functions:
            overrides._push_mode(mode)
        for mode in self._dispatch:
            _python_dispatch._push_mode(mode)
        for pack, unpack in self._hooks:
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
        _set_autocast_depth(self._depth)
        torch.set_autocast_cache_enabled(self._cache)
        if self._autocast != _autocast(self._device):
            for device, enabled, dtype in self._autocast:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        if self._dtype != torch.get_default_dtype():
            torch.set_default_dtype(self._dtype)
        torch._C._set_grad_enabled(self._grad)
        give_generators(self._device, self.rng)
        set_stream(self._device, self._stream)

    @classmethod
    def copy(cls, device: torch.device = _CPU) -> ThreadState:
        """Return the state and leave everything as it is."""
        state = cls(device)
        state.give()
        return state


def _autocast(device: torch.device) -> list[tuple[str, bool, torch.dtype]]:
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys((*_DEVICES, device.type))
    ]


def _take(pop: Any, count: Any) -> list[Any]:
    return [pop() for _ in range(count())][::-1]


def _take_saved_tensor_hooks() -> list[tuple[Any, Any]]:
    taken = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    return taken[::-1]


def _set_autocast_depth(depth: int) -> None:
    now = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    for _ in range(depth - now):
        torch.autocast_increment_nesting()
    for _ in range(now - depth):
        torch.autocast_decrement_nesting()
    if now != depth:
        # Casts of one micro-batch would take another one's gradients.
        torch.clear_autocast_cache()
