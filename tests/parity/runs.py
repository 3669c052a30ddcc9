"""Running a row twice: plainly, and with its bytes on pages."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from . import flows, zoo
from .outcome import Outcome, not_finite
from .recipe import Recipe
from .rows import Row
from .subject import make_subject

GIB = 1 << 30
FITS_GB = 1.0
TINY_SLICE_BYTES = 32768


@dataclass(kw_only=True)
class Paging:
    """Makes the strategies of one paged run, and remembers them for their statistics."""

    row: Row
    max_ram_gb: float
    layer_major: bool | str = "auto"
    strategies: list[Any] = field(default_factory=list)
    schedules: set[str] = field(default_factory=set)

    def make_strategy(self) -> Any:
        strategy = paged_strategy(self.row, self.max_ram_gb, self.layer_major)
        self.strategies.append(strategy)
        return strategy

    def total(self, name: str) -> int:
        """Sum one counter over all strategies."""
        return sum(getattr(strategy.engine.stats, name) for strategy in self.strategies)


def paged_strategy(row: Row, max_ram_gb: float, layer_major: bool | str = "auto") -> Any:
    """Make the strategy of a row."""
    from mt_lightning import MegaTrainStrategy

    settings: dict[str, Any] = {"max_ram_gb": max_ram_gb, "durability": row.durability}
    settings["layer_major"] = layer_major
    settings["recompute"] = {"auto": "auto", "never": False, "always": True}[row.recompute]
    if row.state == "lossless":
        settings["optimizer_compression"] = "lossless"
    if row.slices == "tiny":
        settings["_slice_bytes"] = TINY_SLICE_BYTES
    if row.link == "delayed":
        from mt_lightning.tiers.delayed import DelayedLink

        settings["_link"] = DelayedLink()
    return MegaTrainStrategy(**settings)


def plain_outcome(recipe: Recipe) -> Outcome:
    """Run a recipe under plain Lightning; the last few outcomes are remembered."""
    if recipe.flow in flows.RESUMES:
        recipe = dataclasses.replace(recipe, flow="resume_plain_plain")
    return _cached_plain_outcome(recipe)


@functools.lru_cache(maxsize=8)
def _cached_plain_outcome(recipe: Recipe) -> Outcome:
    with TemporaryDirectory() as directory:
        outcome = run(recipe, Path(directory), lambda: None, lambda: None).outcome
    assert not not_finite(outcome), f"proves nothing: {not_finite(outcome)[:5]}"
    num_steps = max(v for name, v in outcome.values.items() if name.endswith("/global_step"))
    assert num_steps >= 5, "proves little: fewer than five steps"
    return outcome


def paged_outcome(
    row: Row, directory: Path, layer_major: bool | str = "auto"
) -> tuple[Outcome, Paging]:
    """Run a row with its bytes on pages.

    Raises:
        flows.RoundingError: The bits that are promised are those of `layer_major=False`.
    """
    max_ram_gb = FITS_GB
    if row.budget != "fits":
        max_ram_gb = smallest_gb(row) * (1.0 if row.budget == "smallest" else 1.1)
        if row.recipe.structure == "called_twice":
            # What nobody can know before the first step: autograd holds the first of two partial
            # gradients of the layer until it has the second.
            max_ram_gb += layer_bytes(row.recipe) / GIB
    paging = Paging(row=row, max_ram_gb=max_ram_gb, layer_major=layer_major)
    first, second = flows.RESUMES.get(row.recipe.flow, (True, True))
    session = run(
        row.recipe,
        directory,
        paging.make_strategy if first else lambda: None,
        paging.make_strategy if second else lambda: None,
    )
    paging.schedules = session.schedules
    return session.outcome, paging


def run(
    recipe: Recipe, directory: Path, first: flows.MakeStrategy, second: flows.MakeStrategy
) -> flows.Session:
    """Run the flow of a recipe; flows that resume take another strategy for the second leg."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(recipe.num_threads)
    torch.manual_seed(7)
    session = flows.Session(recipe=recipe, directory=directory, make_strategy=first)
    try:
        if recipe.flow in flows.RESUMES:
            path = flows.first_leg(session)
            session.make_strategy = second
            flows.second_leg(session, path)
        else:
            flows.FLOWS[recipe.flow](session)
    finally:
        torch.set_num_threads(num_threads)
    return session


def layer_bytes(recipe: Recipe) -> int:
    """Return the size of the largest layer."""
    layers = zoo.layers_of(recipe.model, make_subject(recipe).network)
    return max(sum(p.numel() * p.element_size() for p in each.parameters()) for each in layers)


def smallest_gb(row: Row) -> float:
    """Ask for far too little and return the smallest budget that the refusal names."""
    return refused_gb(row, 1e-5)


def refused_gb(row: Row, max_ram_gb: float) -> float:
    """Ask for too little and return the smallest budget that the refusal names."""
    from mt_lightning.errors import BudgetError

    with TemporaryDirectory() as directory:
        session = flows.Session(
            recipe=row.recipe,
            directory=Path(directory),
            make_strategy=lambda: paged_strategy(row, max_ram_gb),
        )
        with pytest.raises(BudgetError) as refusal:
            session.fit(session.trainer(), make_subject(row.recipe))
    smallest = refusal.value.smallest_gb
    assert smallest is not None
    assert f"{smallest:.6f}" in str(refusal.value)
    return smallest


def forget_plain_outcomes() -> None:
    """Let the next plain run of every recipe be a new one."""
    _cached_plain_outcome.cache_clear()
