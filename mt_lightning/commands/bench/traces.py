"""Traces of accesses: made up by rule, or recorded from a run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mt_lightning.errors import ConfigError
from mt_lightning.pager.predictor import BACKWARD, FORWARD, INFERENCE

Access = tuple[int, int]
"""Unit, and kind of access."""


@dataclass(frozen=True)
class Trace:
    """What a run used, in order.

    Attributes:
        name: Its name.
        steps: The accesses of each step, evaluation after it included.
    """

    name: str
    steps: list[list[Access]]

    @property
    def num_units(self) -> int:
        """How many different units there are."""
        return len({unit for step in self.steps for unit, _ in step})


def _trained(route: list[int]) -> list[Access]:
    """Return the accesses of forward along a route, and of backward."""
    return [(unit, FORWARD) for unit in route] + [(unit, BACKWARD) for unit in reversed(route)]


def static(draw: random.Random) -> Iterator[list[Access]]:
    """Yield steps of 32 layers in order."""
    while True:
        yield _trained(list(range(32)))


def accumulate(draw: random.Random) -> Iterator[list[Access]]:
    """Yield steps of 32 layers, four micro-batches each."""
    while True:
        yield _trained(list(range(32))) * 4


def validation(draw: random.Random) -> Iterator[list[Access]]:
    """Yield steps of 32 layers; every fifth is followed by four batches of evaluation."""
    while True:
        for number in range(5):
            evaluated = [(unit, INFERENCE) for unit in range(32)] * 4 if number == 4 else []
            yield _trained(list(range(32))) + evaluated


def layer_drop(draw: random.Random) -> Iterator[list[Access]]:
    """Yield steps of 32 layers, of which one in five, by chance, is left out."""
    while True:
        yield _trained([0, *[u for u in range(1, 31) if draw.random() >= 0.2], 31])


def early_exit(draw: random.Random) -> Iterator[list[Access]]:
    """Yield steps that end after 8 to 32 layers, by chance."""
    while True:
        yield _trained(list(range(draw.randint(8, 32))))


def towers(draw: random.Random) -> Iterator[list[Access]]:
    """Yield steps through one tower of 20 layers and one of 12 in turn, and 4 layers of both."""
    while True:
        for tower in (range(20), range(20, 32)):
            yield _trained([*tower, *range(32, 36)])


def random_towers(draw: random.Random) -> Iterator[list[Access]]:
    """Yield steps through one of two towers, by chance."""
    while True:
        yield _trained([*draw.choice((range(20), range(20, 32))), *range(32, 36)])


def experts(
    draw: random.Random, num_layers: int = 8, num_experts: int = 16, num_tokens: int = 8
) -> Iterator[list[Access]]:
    """Yield steps of 8 layers with 16 experts each, of which 8 tokens choose two by Zipf's law."""
    popular = [draw.sample(range(num_experts), num_experts) for _ in range(num_layers)]
    weights = [1 / (rank + 1) for rank in range(num_experts)]
    while True:
        route = []
        for layer in range(num_layers):
            first = layer * (num_experts + 1)
            route.append(first)
            chosen = set()
            for _ in range(num_tokens):
                picks: set[int] = set()
                while len(picks) < 2:
                    picks.add(draw.choices(range(num_experts), weights)[0])
                chosen |= {popular[layer][rank] for rank in picks}
            route += [first + 1 + expert for expert in sorted(chosen)]
        yield _trained(route)


def chance(draw: random.Random) -> Iterator[list[Access]]:
    """Yield forwards of 32 units drawn by chance."""
    while True:
        yield [(draw.randrange(32), INFERENCE) for _ in range(32)]


GENERATORS: dict[str, Callable[[random.Random], Iterator[list[Access]]]] = {
    "static": static,
    "accumulate": accumulate,
    "validation": validation,
    "layer-drop": layer_drop,
    "early-exit": early_exit,
    "towers": towers,
    "random-towers": random_towers,
    "experts": experts,
    "chance": chance,
}


def generate(name: str, num_steps: int, seed: int) -> Trace:
    """Make a trace up."""
    steps = GENERATORS[name](random.Random(seed))
    return Trace(name, [next(steps) for _ in range(num_steps)])


def load(path: str) -> Trace:
    """Read a trace that `mt_lightning.AccessRecorder` has written.

    Raises:
        ConfigError: The file cannot be read, or is no such trace.
    """
    try:
        recorded = json.loads(Path(path).read_text())
        num_units = len(recorded["units"])
        steps = [[(int(unit), int(kind)) for unit, kind in step] for step in recorded["steps"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"bench prefetch: {path} is no trace of accesses ({type(error).__name__}: {error}); "
            "mt_lightning.AccessRecorder writes one."
        ) from error
    kinds = (FORWARD, BACKWARD, INFERENCE)
    wrong = [a for step in steps for a in step if not (0 <= a[0] < num_units and a[1] in kinds)]
    if wrong or len(steps) < 2:
        found = f"access {list(wrong[0])}" if wrong else f"{len(steps)} steps"
        raise ConfigError(
            f"bench prefetch: {path} has {found}; a trace has at least 2 steps, of accesses to its "
            f"{num_units} units of kinds 0 to 2."
        )
    return Trace(Path(path).stem, steps)
