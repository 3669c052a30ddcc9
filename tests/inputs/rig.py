"""Units under their checkpoints, with the tier of their inputs and nothing else of the engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mt_lightning.engine.executor import Executor
from mt_lightning.engine.inputs.file_mover import FileMover
from mt_lightning.engine.inputs.files import InputFiles
from mt_lightning.engine.inputs.through import Through
from mt_lightning.engine.inputs.tier import InputTier
from mt_lightning.engine.units import Unit
from mt_lightning.pager.budget import Budget
from mt_lightning.pager.pool import WeightPool
from mt_lightning.pager.stats import Stats
from mt_lightning.tiers.arena import Arena
from mt_lightning.tiers.doubles import MemoryStore
from mt_lightning.tiers.io import IOQueue
from mt_lightning.tiers.store import Store

FRAME_BYTES = 1 << 14
WIDTH = 64
ROWS = 256
INPUT_BYTES = ROWS * WIDTH * 4


class NoGraphs:
    """Every unit runs again."""

    def begin(self, *_: Any) -> None: ...


class Rig:
    """Attaches executors to units whose weights stay where they are.

    Args:
        units: The modules to run as units.
        limit_bytes: The share of the budget that inputs may take; the budget is that.
        store: Where they go.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        units: Sequence[nn.Module],
        limit_bytes: int = 0,
        store: Store | None = None,
        *,
        max_disk_bytes: int | None = None,
        read_ahead: int = 2,
        usable: bool = True,
    ) -> None:
        self.store = store or MemoryStore()
        self.io, self.arena, self.stats = IOQueue(self.store, 2), Arena(), Stats()
        self.budget = Budget(limit_bytes + 2 * FRAME_BYTES)
        pool = WeightPool(self.arena, self.budget, self.store, self.io, self.stats)
        self.files = InputFiles(self.store, ["."], 0, max_disk_bytes, usable=usable)
        through = [self.budget.reserve(FRAME_BYTES, "state") for _ in range(2)]
        self.frames = [self.arena.alloc(room.nbytes) for room in through]
        room = Through(pool, self.arena, self.frames, limit_bytes)
        mover = FileMover(self.io, self.arena, self.files, self.stats, room)
        self.graphs: Any = NoGraphs()
        self.inputs = self.tier = InputTier(
            pool,
            self.budget,
            mover,
            self.stats,
            self.device,
            limit_bytes,
            read_ahead,
        )
        pool.relieve = self.tier.relieve
        self.seen: list[weakref.ref[Tensor]] = []
        self.peak_bytes = 0
        self.on_replay: Callable[[int], None] = lambda index: None
        self.executors = []
        for index, module in enumerate(units):
            executor = Executor(self, Unit(index, f"unit {index}", module))
            executor.attach()
            self.executors.append(executor)

    # -- the host of executors --------------------------------------------------------------------

    def arrive(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        self._look()
        known = {id(ref()) for ref in self.seen}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and id(value) not in known:
                self.seen.append(weakref.ref(value))
        return args, kwargs

    def enter(self, unit: Unit, *, backward: bool, start: int = 0, again: bool = False) -> None:
        if backward:
            self.on_replay(unit.index)

    def plane(self, index: int) -> Tensor | None:
        raise NotImplementedError

    def executed(self, unit: Unit, start: int, stop: int, *, counted: bool) -> None: ...

    def leave(self, unit: Unit, *, backward: bool) -> None:
        self._look()

    # -- what tests ask ---------------------------------------------------------------------------

    def live_bytes(self) -> int:
        """Return the bytes that the inputs of units hold now, each storage once."""
        storages = {}
        for ref in self.seen:
            tensor = ref()
            if tensor is not None and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = min(storage.nbytes(), tensor.nbytes)
        return sum(storages.values())

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())

    def assert_nothing_is_kept(self) -> None:
        """Check that memory, budget and files have come back."""
        gc.collect()
        self.tier.end_of_step()
        self.tier.end_of_step()
        assert self.files.num_bytes == 0
        assert self.store.names() == []
        held = {k: v for k, v in self.budget.by_purpose.items() if k != "state"}
        assert not any(held.values()), held
        assert not self.tier._items
        assert not self.tier._holds

    def close(self) -> None:
        for executor in self.executors:
            executor.detach()
        self.tier.close()
        assert self.store.names() == []
        self.io.close()


@contextmanager
def rig(units: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Give a rig and close it."""
    made = Rig(units, *args, **kwargs)
    try:
        yield made
    finally:
        made.close()


def stack(num_layers: int = 6, layer: Callable[[], nn.Module] | None = None) -> nn.ModuleList:
    """Make layers, the same ones every time."""
    torch.manual_seed(5)
    make = layer or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.ModuleList(make() for _ in range(num_layers))


def data() -> Tensor:
    """Make what the first unit receives."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def grads(module: nn.Module) -> list[Tensor]:
    """Return the gradients and forget them."""
    found = []
    for param in module.parameters():
        assert param.grad is not None
        found.append(param.grad)
        param.grad = None
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare bit for bit."""
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
