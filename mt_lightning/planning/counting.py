"""Operations and bytes, counted while tensors without memory go through a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_FREE = frozenset(
    (
        "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "unsqueeze",
        "squeeze", "detach", "alias", "select", "split", "as_strided", "chunk", "unbind", "device",
        "empty", "empty_like", "new_empty",
    )
)  # fmt: skip
"""Operations that move no bytes."""


class Fakes:
    """Gives a model's parameters and buffers fake tensors for a while."""

    def __init__(self, model: nn.Module, *, halves: bool = False) -> None:
        self._model = model
        self._halves = halves
        self.tensors: list[Tensor] = []
        self._swapped: list[tuple[dict[str, Any], str, Any]] = []
        self._made: dict[int, Tensor] = {}

        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._swapped.append((table, name, tensor))
                        self._make(tensor)

    def _make(self, tensor: Tensor) -> None:
        if id(tensor) in self._made:
            return
        halved = self._halves and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        dtype = torch.bfloat16 if halved else tensor.dtype
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self.tensors.append(fake)
        self._made[id(tensor)] = fake

    def __enter__(self) -> None:
        for table, name, tensor in self._swapped:
            table[name] = self._made[id(tensor)]

    def __exit__(self, *_: object) -> None:
        for table, name, tensor in self._swapped:
            table[name] = tensor


class Counter(TorchDispatchMode):
    """Counts operations; what gathered weights hold is remembered, to be told from values."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved_bytes = 0.0
        self.num_ops = 0
        self.gathered: dict[int, Any] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self.is_weight: Callable[[Tensor], bool] = lambda tensor: False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        name = packet.__name__
        if name in _FREE:
            return out
        self.num_ops += 1
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if self._gathers(name, tensors):
            # The rows of experts that tokens go to: weights, read in place by a real kernel.
            for result in results:
                self.gathered[id(result.untyped_storage())] = result.untyped_storage()
                self._shapes.add(_sides(result))
            return out
        flops = _FLOPS.get(name)
        if flops is not None:
            self.flops += flops(args, out)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        if packet in flop_registry or flops is not None:
            return out
        if self._shapes and any(_sides(t) in self._shapes for t in (*tensors, *results)):
            return out  # the way of their gradients
        read = [] if name == "embedding" else tensors
        self.moved_bytes += sum(t.numel() * t.element_size() for t in (*read, *results))
        return out

    def _gathers(self, name: str, tensors: list[Tensor]) -> bool:
        if name in ("index", "index_select"):
            return bool(tensors) and self.is_weight(tensors[0])
        if not self.gathered:
            return False
        if name in ("index_put", "new_zeros"):  # the way of their gradients
            return True
        return name == "_to_copy" and id(tensors[0].untyped_storage()) in self.gathered


def _sides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape))


def _attention(args: Any, out: Any) -> float:
    causal = len(args) > 4 and args[4]
    return sdpa_flop_count(*_with_heads_of(args[0], args[:3])) / (2 if causal else 1)


def _attention_backward(args: Any, out: Any) -> float:
    causal = len(args) > 7 and args[7]
    return sdpa_backward_flop_count(*_with_heads_of(args[1], args[:4])) / (2 if causal else 1)


def _with_heads_of(query: Tensor, tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return shapes as if keys and values had a head for each of the queries.

    Each query head multiplies with one, whether others share it or not; torch up to 2.10 does not
    count where they do.
    """
    return [(*query.shape[:2], *tensor.shape[2:]) for tensor in tensors]


_FLOPS: dict[str, Callable[[Any, Any], float]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Operations that torch's own table lacks."""
