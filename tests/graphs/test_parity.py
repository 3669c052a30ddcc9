"""Whether a graph is kept, dropped or never built: the bits are those of plain Lightning."""

from __future__ import annotations

import functools
import random
import weakref
from pathlib import Path
from typing import Any

import pytest

import mt_lightning as mt
from mt_lightning.engine.graphs.keeper import Keeper
from mt_lightning.tiers.delayed import DelayedLink

from .nets import NETS, NUM_LAYERS, Net, Penalised, assert_same, fit, smallest_gb

GIB = 1 << 30
MODES = {
    "eager": {},
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 2},
}
ROOMY_GB = 0.5


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


SOME_MODES = ["eager", *map(slow, ("clipped", "accumulated"))]


def graph_bytes(make: Any, root: Path, **settings: Any) -> int:
    """Return the most that graphs of a net hold."""
    strategy = mt.MegaTrainStrategy(max_ram_gb=ROOMY_GB, recompute=False)
    fit(make(), root, strategy, **settings)
    assert strategy.engine is not None
    return strategy.engine.stats.graph_peak_bytes


def reference(make: Any, root: Path, **settings: Any) -> Net:
    if make.__name__ == "Twice":
        settings = {"max_steps": settings.get("max_steps", 4)}
    return _trained_plainly(make, root.parent, tuple(settings.items()))


@functools.cache
def _trained_plainly(make: Any, root: Path, settings: tuple[tuple[str, Any], ...]) -> Net:
    module = make()
    fit(module, root, **dict(settings))
    return module


def of(make: Any, mode: str) -> dict[str, Any]:
    """Return the trainer's settings; Lightning leaves both to a module with manual optimisation."""
    if make.__name__ == "Twice" and mode != "eager":
        pytest.skip("Lightning leaves clipping and accumulation to the module")
    return MODES[mode]


@pytest.mark.parametrize("mode", SOME_MODES)
@pytest.mark.parametrize("make", NETS, ids=lambda net: net.__name__)
def test_kept_graphs_do_not_need_their_frames(make: Any, mode: str, tmp_path: Path) -> None:
    if make is Penalised:
        pytest.skip("its first backward holds frames until the second")
    settings = of(make, mode)
    expected = reference(make, tmp_path, **settings)
    budget_gb = smallest_gb(make, tmp_path, durability="step")
    if mode == "accumulated":
        # A sum stays in memory while the next gradient of its page comes.
        budget_gb += 4 * sum(p.numel() for p in make().layers[0].parameters()) / GIB
    # Beside what is kept, what units receive: it cannot go to disk while a graph holds it.
    budget_gb += 1.5 * graph_bytes(make, tmp_path, **settings) / GIB
    strategy = mt.MegaTrainStrategy(max_ram_gb=budget_gb, recompute=False, durability="step")
    module = make()
    fit(module, tmp_path, strategy, **settings)
    assert_same(module, expected)
    assert strategy.engine is not None
    stats = strategy.engine.stats
    assert stats.evictions > NUM_LAYERS, "no frame was ever given to somebody else"
    assert stats.units_kept == stats.units_run > 0
    assert stats.ram_peak_bytes <= budget_gb * GIB


@pytest.mark.parametrize("link", ["delayed", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", SOME_MODES)
@pytest.mark.parametrize("make", NETS, ids=lambda net: net.__name__)
def test_graphs_may_be_dropped_at_any_moment(
    make: Any, mode: str, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, drops = random.Random(3), []
    collect, settle = Keeper.collect, Keeper.settle

    def collect_and_drop(self: Keeper) -> None:
        collect(self)
        graphs = [
            graph for ref in self._graphs.values() if (graph := ref()) is not None and graph.alive
        ]
        if graphs and dice.random() < 0.3:
            graph = dice.choice(graphs)
            graph.drop()
            self._free(graph.number)
            drops.append(weakref.ref(graph))

    monkeypatch.setattr(Keeper, "collect", collect_and_drop)
    assert Keeper.settle is settle
    settings = of(make, mode)
    expected = reference(make, tmp_path, **settings)
    options: dict[str, Any] = {"_link": DelayedLink()} if link == "delayed" else {}
    strategy = mt.MegaTrainStrategy(
        max_ram_gb=ROOMY_GB, recompute=False, durability="step", **options
    )
    module = make()
    fit(module, tmp_path, strategy, **settings)
    assert_same(module, expected)
    assert len(drops) > 2
    assert strategy.engine is not None
    assert strategy.engine.stats.graphs_kept > len(drops)


@pytest.mark.parametrize("share", [0.5, *map(slow, (0.0, 0.25, 0.75, 1.0))])
@pytest.mark.parametrize("make", NETS, ids=lambda net: net.__name__)
def test_auto_keeps_what_finds_room(make: Any, share: float, tmp_path: Path) -> None:
    expected = reference(make, tmp_path)
    probe = mt.MegaTrainStrategy(max_ram_gb=ROOMY_GB, durability="step")
    fit(make(), tmp_path, probe)
    assert probe.engine is not None
    assert probe.engine.plan is not None
    peak_bytes = probe.engine.stats.graph_peak_bytes
    # All that the plan leaves beyond weights, gradients and state is room for graphs.
    spare_bytes = probe.engine.plan.graph_bytes - int(share * peak_bytes)
    budget_gb = ROOMY_GB - spare_bytes / GIB
    strategy = mt.MegaTrainStrategy(max_ram_gb=budget_gb, durability="step")
    module = make()
    fit(module, tmp_path, strategy)
    assert_same(module, expected)
    assert strategy.engine is not None
    stats = strategy.engine.stats
    assert stats.graph_peak_bytes <= share * peak_bytes
    assert stats.ram_peak_bytes <= budget_gb * GIB
    if share in (0.0, 1.0) and peak_bytes:
        assert (stats.units_kept == stats.units_run) is (share == 1.0)
