"""What a model computes, unit by unit, found by running it on tensors without memory.

[Note: a run without memory] The model runs forward once on fake tensors: every operation says the
shape of its result and computes nothing. Each unit then runs backward by itself, the same way. So
operations, bytes and what autograd saves are counted, not estimated by a formula for one kind of
model. A unit like one that ran before is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from mt_lightning.engine.units import Unit
from mt_lightning.planning.counting import Counter, Fakes
from mt_lightning.planning.machines import Device

_LOSS_COPIES = 3
"""Of a chunk of logits that exist at once."""

Run = Callable[[nn.Module], Any]
"""Runs a model on one micro-batch of its own making, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one execution of a unit takes, for one micro-batch.

    Attributes:
        flops: Operations of matrix products in forward.
        moved_bytes: Bytes that other operations read and write in forward.
        num_ops: Operations in forward.
        backward_flops: The same of backward, without running forward again.
        backward_moved_bytes: The same.
        backward_num_ops: The same.
        saved_bytes: What autograd keeps for backward, weights not counted.
        input_bytes: What the unit receives that no unit before it received and that grows with the
            batch.
        live_bytes: What exists at once inside the unit, at most, beside its weights: what it saves,
            its results and their gradients.
        forward_s: Seconds that forward took on this machine; 0 where it was not run.
        backward_s: The same of backward.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    num_ops: int = 0
    backward_flops: float = 0.0
    backward_moved_bytes: float = 0.0
    backward_num_ops: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    live_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0

    def seconds(self, device: Device, dtype: str, *, backward: bool = False) -> float:
        """Return how long one execution takes: as it was measured, else by the device's rates.

        Args:
            device: Its rates.
            dtype: Of matrix products.
            backward: Whether backward is asked for, without running forward again.
        """
        if backward:
            rest = self.backward_flops, self.backward_moved_bytes, self.backward_num_ops
            return self.backward_s or device.seconds(*rest, dtype)
        return self.forward_s or device.seconds(self.flops, self.moved_bytes, self.num_ops, dtype)


@dataclass(frozen=True)
class Like:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Sample:
    """One execution of each kind of unit, to be repeated with real tensors.

    Attributes:
        unit: Number of the unit.
        args: What it received; tensors are `Like`.
        kwargs: The same.
        alike: Numbers of the units that do the same, itself among them.
    """

    unit: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    alike: tuple[int, ...]


@dataclass(frozen=True)
class ModelWork:
    """What a model computes for one micro-batch.

    Attributes:
        units: By the number of each unit.
        outside: What is computed outside of units, the loss among it.
        order: Numbers of the units as forward enters them.
        reason: Why it was estimated from the number of parameters; empty where it was counted.
        samples: An execution of each kind of unit; of units that run once in a pass.
    """

    units: tuple[Work, ...]
    outside: Work
    order: tuple[int, ...]
    reason: str = ""
    samples: tuple[Sample, ...] = ()

    @property
    def flops(self) -> float:
        """Operations of forward and backward, nothing computed twice."""
        return sum(w.flops + w.backward_flops for w in (*self.units, self.outside))


def count_work(
    model: nn.Module,
    units: list[Unit],
    run: Run,
    *,
    autocast: bool,
    halves: bool = False,
    head: nn.Module | None = None,
    chunk_bytes: int = 0,
) -> ModelWork:
    """Count what a model computes.

    Args:
        model: The model, on meta.
        units: Its units.
        run: Runs it and returns its loss, or anything that holds tensors.
        autocast: Whether matrix products run in bfloat16 on float32 weights.
        halves: Whether the weights are bfloat16.
        head: The unit whose result, the logits, exists in chunks only; None where there is none.
        chunk_bytes: Bytes of such a chunk.

    Raises:
        Exception: What running the model raises, where it cannot run without memory.
    """
    counter, spy = Counter(), _Spy(units, head, chunk_bytes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = Fakes(model, halves=halves)
        spy.weights = {id(t.untyped_storage()): None for t in made.tensors}
        spy.storages = [t.untyped_storage() for t in made.tensors]
        with made, spy.watching(counter), _autocast(autocast), counter, torch.enable_grad():
            out = run(model)
            del out
    inside = [work for work in spy.works if work is not None]
    outside = Work(
        flops=counter.flops - spy.flops,
        moved_bytes=max(0.0, counter.moved_bytes - spy.moved_bytes),
        num_ops=max(0, counter.num_ops - spy.num_ops),
        backward_flops=2 * (counter.flops - spy.flops),
        backward_moved_bytes=2 * max(0.0, counter.moved_bytes - spy.moved_bytes),
        backward_num_ops=2 * max(0, counter.num_ops - spy.num_ops),
    )
    assert inside
    works = tuple(w or Work() for w in spy.works)
    return ModelWork(works, outside, tuple(spy.order), samples=spy.samples())


def estimate_work(units: list[Unit], tokens: int, reason: str) -> ModelWork:
    """Estimate from the number of parameters, for a model that does not run without memory.

    Each element of a matrix takes two operations for each token, and twice that in backward.
    """
    works = []
    for unit in units:
        matrices = [p for p in unit.module.parameters() if p.dim() > 1]
        looked_up = any(isinstance(m, nn.Embedding) for m in unit.module.modules())
        flops = 0.0 if looked_up else 2.0 * tokens * sum(p.numel() for p in matrices)
        width = max((min(p.shape) for p in matrices), default=1)
        saved = sum(4 * tokens * (p.shape[0] + p.shape[-1]) for p in matrices)
        works.append(
            Work(
                flops=flops,
                moved_bytes=3.0 * saved,
                num_ops=10 * len(matrices),
                backward_flops=2 * flops,
                backward_moved_bytes=6.0 * saved,
                backward_num_ops=20 * len(matrices),
                saved_bytes=saved,
                input_bytes=0 if looked_up else 4 * tokens * width,
                live_bytes=2 * saved,
            )
        )
    return ModelWork(tuple(works), Work(), tuple(range(len(units))), reason)


def _autocast(on: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=on, cache_enabled=False)


class _Spy:
    """Stands before the forward of each unit."""

    def __init__(self, units: list[Unit], head: nn.Module | None, chunk_bytes: int) -> None:
        self._units, self._head, self._chunk_bytes = units, head, chunk_bytes
        self.works: list[Work | None] = [None] * len(units)
        self.order: list[int] = []
        self.flops = self.moved_bytes = 0.0
        self.num_ops = 0
        self.weights: dict[int, None] = {}
        self.storages: list[Any] = []
        self._known: dict[Any, tuple[Work, Any]] = {}
        self._seen: dict[Any, tuple[Unit, Any, Any]] = {}
        self._kinds: dict[int, list[Any]] = {}
        self._received: set[int] = set()
        self._kept: list[Any] = []

    def watching(self, counter: Counter) -> _Watching:
        """Return a context in which units are watched."""
        counter.is_weight = self._is_weight
        return _Watching(self, self._units, counter)

    def _is_weight(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self.weights

    def enter(
        self, unit: Unit, forward: Callable[..., Any], counter: Counter, args: Any, kwargs: Any
    ) -> Any:
        """Run a unit, or recall what one like it gave."""
        self.order.append(unit.index)
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fresh = 0
        for leaf in leaves:
            key = id(leaf.untyped_storage())
            if key not in self._received and leaf.is_floating_point() and leaf.requires_grad:
                fresh += leaf.numel() * leaf.element_size()
            self._received.add(key)
            self._kept.append(leaf.untyped_storage())
        key = (
            type(unit.module),
            tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in unit.module.parameters()),
            tuple((tuple(t.shape), t.dtype) for t in leaves),
        )
        self._kinds.setdefault(unit.index, []).append(key)
        if key in self._known:
            work, shapes = self._known[key]
            out = tree_map(_again, shapes)
        else:
            before = (counter.flops, counter.moved_bytes, counter.num_ops)
            self._seen[key] = unit, tree_map(_like, args), tree_map(_like, kwargs)
            work, out = self._count(unit, forward, counter, args, kwargs)
            self._known[key] = (work, tree_map(_without_history, out))
            self.flops += counter.flops - before[0]
            self.moved_bytes += counter.moved_bytes - before[1]
            self.num_ops += counter.num_ops - before[2]
        found = self.works[unit.index]
        if found is None:
            self.works[unit.index] = _with_input(work, fresh)
        else:
            self.works[unit.index] = _added(found, _with_input(work, fresh))
        return out

    def samples(self) -> tuple[Sample, ...]:
        """Return one execution of each kind of unit."""
        return tuple(
            Sample(unit.index, args, kwargs, tuple(i for i, k in self._kinds.items() if k == [key]))
            for key, (unit, args, kwargs) in self._seen.items()
        )

    def _count(
        self, unit: Unit, forward: Callable[..., Any], counter: Counter, args: Any, kwargs: Any
    ) -> tuple[Work, Any]:
        args, kwargs = tree_map(_as_leaf, (args, kwargs))
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in self.weights:
                saved[id(storage)] = storage.nbytes()
                self._kept.append(storage)
            return tensor

        start = (counter.flops, counter.moved_bytes, counter.num_ops)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(*args, **kwargs)
        middle = (counter.flops, counter.moved_bytes, counter.num_ops)
        for key in counter.gathered:
            saved.pop(key, None)
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(t) for t in results])
        end = (counter.flops, counter.moved_bytes, counter.num_ops)
        for param in unit.module.parameters():
            param.grad = None
        saved_bytes = sum(saved.values())
        result_bytes = sum(t.numel() * t.element_size() for t in results)
        live_bytes = saved_bytes + 2 * result_bytes
        if unit.module is self._head:
            live_bytes = saved_bytes + _LOSS_COPIES * min(self._chunk_bytes, result_bytes)
        work = Work(
            flops=middle[0] - start[0],
            moved_bytes=middle[1] - start[1],
            num_ops=middle[2] - start[2],
            backward_flops=end[0] - middle[0],
            backward_moved_bytes=end[1] - middle[1],
            backward_num_ops=end[2] - middle[2],
            saved_bytes=saved_bytes,
            live_bytes=live_bytes,
        )
        return work, tree_map(_as_leaf, out)


class _Watching:
    def __init__(self, spy: _Spy, units: Iterable[Unit], counter: Counter) -> None:
        self._spy, self._units, self._counter = spy, list(units), counter

    def __enter__(self) -> None:
        for unit in self._units:
            forward = unit.module.forward

            def spied(*args: Any, _unit: Unit = unit, _own: Any = forward, **kwargs: Any) -> Any:
                return self._spy.enter(_unit, _own, self._counter, args, kwargs)

            unit.module.forward = spied

    def __exit__(self, *_: object) -> None:
        for unit in self._units:
            del unit.module.forward


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return Like(value.shape, value.dtype, value.requires_grad)


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad and value.is_floating_point())


def _without_history(value: Any) -> Any:
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )


def _again(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value).requires_grad_(value.requires_grad)


def _with_input(work: Work, nbytes: int) -> Work:
    return Work(**{**vars(work), "input_bytes": nbytes, "live_bytes": work.live_bytes + nbytes})


def _added(one: Work, other: Work) -> Work:
    """Add the second execution of a unit to the first."""
    both = {name: value + getattr(other, name) for name, value in vars(one).items()}
    return Work(**{**both, "live_bytes": max(one.live_bytes, other.live_bytes)})
