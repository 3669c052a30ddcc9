"""Run a unit on its pages, forward and again in backward.

[Note: why torch's own checkpoint]
The unit's `forward` is wrapped in `torch.utils.checkpoint` (non-reentrant) whose context managers
bind and release the pages. The autograd graph is then exactly the one plain PyTorch builds, so
gradients are summed in the same order and tensors that escape through hooks keep their history. The
unit's inputs are kept; everything else is computed again when backward asks for it, unless it was
kept too (see `graphs.graph`).

[Note: a forward must count once]
The replay must not be visible. Buffers, plain attributes (counters, stashed losses) and caches
handed in are as the first execution found them while it runs again, and as it left them afterwards.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mt_lightning.engine.checkpoints_left import end_checkpoints
from mt_lightning.engine.compiled import CompiledCall, untraced
from mt_lightning.engine.graphs.graph import Binding, Graph
from mt_lightning.engine.graphs.keeper import Keeper
from mt_lightning.engine.inputs.item import Kept
from mt_lightning.engine.inputs.tier import InputTier
from mt_lightning.engine.on_device import give_rng, take_rng
from mt_lightning.engine.routing import Routes
from mt_lightning.engine.units import Unit
from mt_lightning.engine.usage import next_sequence_number
from mt_lightning.errors import StepError
from mt_lightning.tiers.ledger import COMPUTE, RECOMPUTE
from mt_lightning.tiers.spans import Span

_INTERNAL = ("_parameters", "_buffers", "_modules")


class Host(Binding, Protocol):
    """What an executor asks of the engine.

    Attributes:
        device: Where units compute.
    """

    device: torch.device

    def arrive(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wait for the unit's turn; return the arguments to run it with."""
        ...

    @property
    def graphs(self) -> Keeper:
        """Keeps graphs between forward and backward."""
        ...

    @property
    def inputs(self) -> InputTier:
        """Counts what units receive, and moves it to disk and back."""
        ...

    def executed(self, unit: Unit, start: int, stop: int, *, counted: bool) -> None:
        """Take note of the autograd nodes that an execution made, by sequence number.

        `counted` says whether it changed buffers.
        """


class Executor:
    """Replaces one unit's `forward` while the engine is attached."""

    def __init__(self, host: Host, unit: Unit) -> None:
        self._host = host
        self._unit = unit
        self._modules = list(unit.module.modules())
        self._own = unit.module.__dict__.get("forward")
        self._forward: Callable[..., Any] = unit.module.forward
        compiled = unit.module._compiled_call_impl is not None
        self._compiled = CompiledCall(unit.module) if compiled else None
        self._routes = Routes(unit.module)

    def attach(self) -> None:
        """Install the wrapper on the instance."""

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(self._compiled or self._forward, args, kwargs)

        def run_inside(function: Callable[..., Any], *args: Any) -> Any:
            return self._run(function, args, {})

        wrapper: Any = untraced(forward)
        # For what reads the unit's weights without being its forward; see `losses.chunked`.
        wrapper.run_inside = run_inside
        self._unit.module.forward = wrapper
        if self._compiled is not None:
            self._compiled.attach()

    def detach(self) -> None:
        """Restore what was there before."""
        if self._compiled is not None:
            self._compiled.detach()
        if self._own is None:
            self._unit.module.__dict__.pop("forward", None)
        else:
            self._unit.module.forward = self._own

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args, kwargs = self._host.arrive(self._unit, args, kwargs)
        if not torch.is_grad_enabled():
            self._host.enter(self._unit, backward=False)
            cache = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                with Span("forward", self._unit.name, COMPUTE):
                    return function(*args, **kwargs)
            finally:
                torch.set_autocast_cache_enabled(cache)
                self._host.leave(self._unit, backward=False)
        execution = _Execution(
            self._host, self._unit, self._modules, self._routes, function, args, kwargs
        )
        execution.kept = self._host.inputs.keep(args, kwargs)
        graph = self._host.graphs.begin(self._host, self._unit, args, kwargs)
        if graph is not None:
            execution.graph = weakref.ref(graph)
        try:
            result = checkpoint(
                execution,
                *args,
                use_reentrant=False,
                context_fn=execution.contexts,
                preserve_rng_state=True,
            )
        except BaseException as error:
            end_checkpoints(error)
            raise
        if graph is not None:
            graph.settle(result)
        return result


class _Execution:
    """One execution of a unit and its replays."""

    def __init__(
        self,
        host: Host,
        unit: Unit,
        modules: list[nn.Module],
        routes: Routes,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.host = host
        self.unit = unit
        self.modules = modules
        self.routes = routes
        self.choices: list[torch.Tensor] = []
        self._forward = forward
        self._kwargs = kwargs
        self.dtype = torch.get_default_dtype()
        self.rng: torch.Tensor | None = None
        self.start = 0
        self.kept: Kept | None = None
        self.replaying = False
        self.before: _ModuleState | None = None
        # Weakly: what is dropped must not wait for the garbage collector.
        self.graph: Callable[[], Graph | None] = lambda: None
        self._versions = [
            (name, value._version)
            for name, value in kwargs.items()
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]
        self._caches = {
            id(value): _copy_cache(value) for value in (*args, *kwargs.values()) if _is_cache(value)
        }

    def __call__(self, *args: Any) -> Any:
        kwargs = self._kwargs
        if self.replaying:
            for name, version in self._versions:
                if kwargs[name]._version != version:
                    raise StepError(
                        f"argument {name} of {self.unit.name} was changed in place after the "
                        f"unit had "
                        "begun to run, so backward cannot run it again. Change a copy instead."
                    )
        if self.replaying and self._caches:
            args = tuple(self._fresh(value) for value in args)
            kwargs = {key: self._fresh(value) for key, value in kwargs.items()}
        return self._forward(*args, **kwargs)

    def contexts(self) -> tuple[_First, _Replay]:
        """Return the context managers of the first execution and of every replay."""
        return _First(self), _Replay(self)

    def _fresh(self, value: Any) -> Any:
        kept = self._caches.get(id(value))
        return value if kept is None else _copy_cache(kept)


class _Bound:
    """Binds around one execution; autocast's cache is off, it would keep casts of weights."""

    backward = False

    def __init__(self, execution: _Execution) -> None:
        self._execution = execution
        self._cache: list[bool] = []
        self._spans: list[Span] = []
        self._modes: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        run = self._execution
        graph = run.graph()
        again = self.backward and graph is not None and graph.arrived
        run.host.enter(run.unit, backward=self.backward, start=run.start, again=again)
        if self.backward and run.kept is not None:
            run.host.inputs.bring(run.kept)
        self._cache.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        self.begin(run)
        phase, account = ("recompute", RECOMPUTE) if self.backward else ("forward", COMPUTE)
        self._spans.append(Span(phase, run.unit.name, account))
        self._spans[-1].__enter__()
        modes = run.routes.replaying if self.backward else run.routes.recording
        self._modes.append(modes(run.choices))
        self._modes[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        run = self._execution
        self._modes.pop().__exit__(*error)
        self._spans.pop().__exit__(*error)
        self.end(run)
        torch.set_autocast_cache_enabled(self._cache.pop())
        run.host.leave(run.unit, backward=self.backward)

    def begin(self, run: _Execution) -> None:
        raise NotImplementedError

    def end(self, run: _Execution) -> None:
        raise NotImplementedError


class _First(_Bound):
    def begin(self, run: _Execution) -> None:
        # Checkpoint saves that of the host, and of devices that its positional arguments are on.
        run.rng = take_rng(run.host.device)
        run.before = _ModuleState(run.modules)
        run.start = next_sequence_number()
        if (graph := run.graph()) is not None:
            graph.open(run.start)

    def end(self, run: _Execution) -> None:
        if (graph := run.graph()) is not None:
            graph.close()
        assert run.before is not None
        counted = run.before.buffers_changed()
        if not counted:
            run.before.drop_buffers()
        run.routes.executed(run.choices)
        run.host.executed(run.unit, run.start, next_sequence_number(), counted=counted)


class _Replay(_Bound):
    backward = True

    def __init__(self, execution: _Execution) -> None:
        super().__init__(execution)
        self._left: list[tuple[_ModuleState, torch.dtype, torch.Tensor | None]] = []

    def begin(self, run: _Execution) -> None:
        now = _ModuleState(run.modules, keep_buffers=True)
        device = run.host.device
        self._left.append((now, torch.get_default_dtype(), take_rng(device)))
        torch.set_default_dtype(run.dtype)
        give_rng(device, run.rng)
        now.lend_buffers()
        if run.before is not None:
            run.before.restore(copy_buffers=True)
        run.replaying = True

    def end(self, run: _Execution) -> None:
        run.replaying = False
        now, dtype, rng = self._left.pop()
        torch.set_default_dtype(dtype)
        give_rng(run.host.device, rng)
        now.restore()


class _ModuleState:
    """Plain attributes and buffers of some modules at one moment."""

    def __init__(self, modules: list[nn.Module], *, keep_buffers: bool = False) -> None:
        self._attributes = [
            (
                module,
                {k: (v, _contents(v)) for k, v in module.__dict__.items() if k not in _INTERNAL},
            )
            for module in modules
        ]
        self._buffers = [
            (module, name, buffer, buffer if keep_buffers else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def buffers_changed(self) -> bool:
        """Return whether any buffer holds other values, or is another tensor, now."""
        return any(
            module._buffers.get(name) is not buffer or not _same_bits(buffer, saved)
            for module, name, buffer, saved in self._buffers
        )

    def drop_buffers(self) -> None:
        """Forget the buffers; they did not change."""
        self._buffers = []

    def lend_buffers(self) -> None:
        """Give the modules copies to work on until `restore` puts the kept ones back."""
        for module, name, _, saved in self._buffers:
            module._buffers[name] = saved.clone()

    def restore(self, *, copy_buffers: bool = False) -> None:
        """Put everything back as it was; with `copy_buffers` the kept buffers stay untouched."""
        for module, kept in self._attributes:
            now = module.__dict__
            for key in [k for k in now if k not in kept and k not in _INTERNAL]:
                del now[key]
            for key, (value, contents) in kept.items():
                if contents is not None and not _same_contents(value, contents):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(contents)
                now[key] = value
        for module, name, _, saved in self._buffers:
            module._buffers[name] = saved.clone() if copy_buffers else saved


def _contents(value: Any) -> Any:
    """Return a shallow copy of a plain container, None for anything else."""
    return value.copy() if type(value) in (list, dict, set) else None


def _same_contents(value: Any, contents: Any) -> bool:
    """Compare by identity: items may be tensors."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(value.get(key) is item for key, item in contents.items())
    if isinstance(value, set):
        return value == contents
    return all(a is b for a, b in zip(value, contents, strict=True))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _is_cache(value: Any) -> bool:
    """Return whether `value` is a key-value cache, which an execution appends to."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def _copy_cache(cache: Any) -> Any:
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(twin, name, [_copy_layer(item) for item in value])
        elif isinstance(value, dict):
            setattr(twin, name, dict(value))
        elif _is_cache(value):
            setattr(twin, name, _copy_cache(value))
    return twin


def _copy_layer(item: Any) -> Any:
    return item if isinstance(item, torch.Tensor) else copy.copy(item)
