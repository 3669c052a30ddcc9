"""Logits that are computed only if somebody looks at them; their cross-entropy comes in chunks.

[Note: what the model does decides]
No table says which architecture has which loss. While a model runs, its head gives `Deferred`
logits, which take note of what is done to them: factors, a soft cap, a cast, a shift of the tokens.
Reaching `cross_entropy`, they compute the loss in chunks with just those settings. Whatever else
is done to them is done to the logits as a whole, as it would have been without any of this.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mt_lightning.errors import StepError
from mt_lightning.losses.chunked import (
    ChunkSize,
    CrossEntropy,
    Head,
    Step,
    chunk_tokens,
    cross_entropy,
)

_ON_VALUES = {
    *("div", "true_divide", "__truediv__", "mul", "multiply", "__mul__", "__rmul__"),
    *("tanh", "float", "double", "to"),
}
_ON_TOKENS = {"view", "reshape", "flatten", "contiguous"}
_METADATA = {
    *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout),  # type: ignore
    *(Tensor.is_cuda, Tensor.is_cpu, Tensor.is_sparse, Tensor.requires_grad),  # type: ignore
}
_METADATA_CALLS = {"size", "dim", "numel", "nelement", "is_floating_point", "element_size"}
_ENTROPY = inspect.signature(F.cross_entropy)


@dataclass
class Deferral:
    """What became of the logits of one forward pass.

    Attributes:
        chunked: number of losses that were taken in chunks.
        whole: names of the operations that needed the logits as a whole.
    """

    chunked: int = 0
    whole: list[str] = field(default_factory=list)


@contextmanager
def deferred_logits(head: nn.Linear, chunk_size: ChunkSize) -> Iterator[Deferral]:
    """Let `head` give deferred logits inside, so that a model's own loss comes in chunks.

    Args:
        head: the head of the model that runs inside.
        chunk_size: as in `chunked_loss`.
    """
    deferral = Deferral()
    before, own = head.forward, head.__dict__.get("forward")

    def forward(input: Tensor) -> Tensor:
        # Sharded weights have another shape or type until the module's own hooks have run.
        whole = head.weight.shape == (head.out_features, head.in_features)
        if type(input) is not Tensor or not whole or type(head.weight.data) is not Tensor:
            return before(input)
        source = _Source(Head(head, forward=before), input, chunk_size, deferral)
        return Deferred(source, input, head.out_features, _dtype(input, head))

    head.forward = forward
    try:
        yield deferral
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def _dtype(hidden: Tensor, head: nn.Linear) -> torch.dtype:
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return head.weight.dtype


class _Source:
    """One call of the head."""

    def __init__(
        self, head: Head, hidden: Tensor, chunk_size: ChunkSize, deferral: Deferral
    ) -> None:
        self.head = head
        self.hidden = hidden
        self.chunk_size: ChunkSize = chunk_size
        self.deferral = deferral
        self.grad_enabled = torch.is_grad_enabled()
        self.made: list[weakref.ref[Deferred]] = []

    def compute(self) -> Tensor:
        """Call the head as it would have been called, for a first reader without gradients too."""
        assert self.head.forward is not None
        with torch.set_grad_enabled(self.grad_enabled):
            return self.head.forward(self.hidden)


class Deferred(Tensor):
    """Logits `[..., vocabulary]` of some hidden states `[..., features]`, not computed yet.

    `parent` is what they were made from by `step`, None for what the head gave; `on_values` are the
    steps on the way that changed values.
    """

    _source: _Source
    _hidden: Tensor
    _parent: Deferred | None
    _step: Step | None
    _on_values: tuple[Step, ...]
    _made: Tensor | None

    @staticmethod
    def __new__(
        cls: type[Deferred],
        source: _Source,
        hidden: Tensor,
        num_classes: int,
        dtype: torch.dtype,
        parent: Deferred | None = None,
        step: Step | None = None,
        on_values: tuple[Step, ...] = (),
    ) -> Deferred:
        """Make a tensor of the logits' shape and dtype, without storage."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], num_classes),
            dtype=dtype,
            device=hidden.device,
            requires_grad=source.grad_enabled,
        )
        made._source, made._hidden, made._parent, made._step = source, hidden, parent, step
        made._on_values, made._made = on_values, None
        if source.grad_enabled:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse)
        source.made.append(weakref.ref(made))
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take note of what is done, compute a loss in chunks, or compute the logits."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        known = name in _METADATA_CALLS
        if name in ("__get__", "__set__"):
            known = name == "__get__" and getattr(func, "__self__", None) in _METADATA
        if known:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Deferred) and first._made is None:
            result = first._defer(func, name, args[1:], kwargs)
            if result is not None:
                return result
        if _may_write(name, kwargs):
            for deferred in _all_of((args, kwargs)):
                for relative in [reference() for reference in deferred._source.made]:
                    if relative is not None:
                        relative._whole(name)
        return _call_with_logits(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the logits for code that bypasses `__torch_function__`."""
        return _call_with_logits(func, str(func), args, kwargs or {})

    def _whole(self, name: str) -> Tensor:
        """Compute the logits; `name` is the function that wants them."""
        if self._made is None:
            if self._parent is None:
                self._source.deferral.whole.append(name)
                self._made = self._source.compute()
            else:
                assert self._step is not None
                function, args, kwargs = self._step
                parent = self._parent._whole(name)
                with torch.set_grad_enabled(self._source.grad_enabled):
                    self._made = function(parent, *args, **kwargs)
        return self._made

    def _defer(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        if func is F.cross_entropy:
            return self._cross_entropy(args, kwargs)
        step = (func, args, kwargs)
        hidden, dtype, on_values = None, self.dtype, self._on_values
        if name in _ON_VALUES:
            if all(self._is_setting(name, value) for value in (*args, *kwargs.values())):
                empty = torch.empty(0, dtype=dtype, device=self.device)
                hidden, dtype = self._hidden, func(empty, *args, **kwargs).dtype
                on_values = (*on_values, step)
        elif name in _ON_TOKENS:
            shape = func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape
            if shape and shape[-1] == self.shape[-1]:
                hidden = self._hidden.reshape(*shape[:-1], self._hidden.shape[-1])
        elif name == "__getitem__":
            index = _token_slices(args[0], self.dim())
            hidden = None if index is None else self._hidden[index]
        if hidden is None:
            return None
        return Deferred(self._source, hidden, self.shape[-1], dtype, self, step, on_values)

    def _is_setting(self, name: str, value: Any) -> bool:
        """Return whether an argument is a number, or the dtype or the present place of a cast."""
        if name == "to":
            return isinstance(value, torch.dtype) or value == self.device
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def _cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        call = _ENTROPY.bind(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        target: Tensor = given["target"]
        if (
            given["weight"] is not None
            or given["size_average"] is not None
            or given["reduce"] is not None
            or given["reduction"] not in ("mean", "sum")
            or type(target) is not Tensor
            or target.is_floating_point()
            or self.dim() != 2
            or target.shape != self.shape[:1]
        ):
            return None
        loss = CrossEntropy(
            steps=self._on_values,
            ignore_index=given["ignore_index"],
            reduction=given["reduction"],
            label_smoothing=given["label_smoothing"],
        )
        source = self._source
        source.deferral.chunked += 1
        num_tokens = chunk_tokens(source.chunk_size, self.shape[-1], self.device)
        return cross_entropy(self._hidden, source.head, target, loss, num_tokens)


def _refuse(grad: Tensor) -> None:
    raise StepError(
        "A gradient came for logits that were never computed: the model hands them to a "
        "torch.autograd.Function of its own. Let it compute its loss as it does without this "
        "package: loss_chunk_size=None in CausalLMModule."
    )


def _may_write(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a function may change its arguments, after which nothing can be deferred."""
    dunder = name.endswith("__")
    changes = name.startswith("__i") or name in ("__setitem__", "__set__", "__delitem__")
    return changes if dunder else name.endswith("_") or "out" in kwargs


def _all_of(arguments: Any) -> list[Deferred]:
    return [value for value in tree_leaves(arguments) if isinstance(value, Deferred)]


def _call_with_logits(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    def compute(value: Any) -> Any:
        return value._whole(name) if isinstance(value, Deferred) else value

    return func(*tree_map(compute, args), **tree_map(compute, kwargs))


def _token_slices(index: Any, num_dims: int) -> tuple[slice, ...] | None:
    """Return an index as slices of the dimensions of tokens, None if it is anything else."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return None
    if parts.count(Ellipsis) > 1 or len(parts) - parts.count(Ellipsis) > num_dims:
        return None
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    missing = num_dims - (len(parts) - parts.count(Ellipsis))
    parts[at : at + 1] = [slice(None)] * missing
    return tuple(parts[:-1]) if parts[-1] == slice(None) else None
