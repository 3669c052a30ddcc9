"""What a run costs beside memory: days, drives worn out, energy, rent."""

from __future__ import annotations

from dataclasses import dataclass

from mt_lightning.engine.durability import COMMIT_INTERVAL_S
from mt_lightning.errors import ConfigError
from mt_lightning.planning.planner import Answer

_RANGES = {"tokens": (1, 1e18), "per_hour": (0, 1e9), "per_kwh": (0, 1e9)}
"""What can be asked for: more is a slip of the pen."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What is asked for, and what things cost; None where it does not matter.

    Attributes:
        tokens: Tokens to be trained on.
        per_hour: Rent of the machine.
        per_kwh: Energy.
    """

    tokens: float | None = None
    per_hour: float | None = None
    per_kwh: float | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name}={value!r}: give a number from {least} to {most:g}.")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the run costs; None where nobody can say.

    Attributes:
        written_per_step: Bytes written in a step, commits of kept pages shared out.
        steps_per_drive_life: Steps after which the drives have written what they are rated for.
        steps: Steps of the run.
        days: How long it takes.
        drive_lives: Share of the drives' lives that it takes.
        energy_kwh: What it draws.
        energy_price: What that costs.
        rent: What the machine costs.
    """

    written_per_step: float
    steps_per_drive_life: float | None
    steps: float | None = None
    days: float | None = None
    drive_lives: float | None = None
    energy_kwh: float | None = None
    energy_price: float | None = None
    rent: float | None = None


def costs_of(found: Answer, prices: Prices) -> Costs:
    """Work the costs out; the run fits."""
    assert found.time is not None
    assert found.plan is not None
    time, drives = found.time, found.machine.drives
    written = time.written_bytes
    if found.plan.durability == "checkpoint":
        written += found.plan.commit_bytes * min(1.0, time.seconds / COMMIT_INTERVAL_S)
    ratings = [drive.endurance_bytes for drive in drives]
    life = None
    if written and ratings and all(rating is not None for rating in ratings):
        # The drive that is worn first ends the run.
        shares = zip(ratings, found.machine.drive_shares, strict=True)
        life = min(rating / (written * share) for rating, share in shares if rating is not None)
    if prices.tokens is None:
        return Costs(written_per_step=written, steps_per_drive_life=life)
    steps = prices.tokens / time.tokens
    hours = steps * time.seconds / 3600
    energy = found.machine.watts * hours / 1000
    return Costs(
        written_per_step=written,
        steps_per_drive_life=life,
        steps=steps,
        days=hours / 24,
        drive_lives=None if life is None else steps / life,
        energy_kwh=energy,
        energy_price=None if prices.per_kwh is None else energy * prices.per_kwh,
        rent=None if prices.per_hour is None else hours * prices.per_hour,
    )
