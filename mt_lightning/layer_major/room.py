"""How much memory steps may hold between units, beside the weights that run."""

from __future__ import annotations

from mt_lightning.engine.engine import Engine
from mt_lightning.pager.budget import Reservation


def weights_fit(engine: Engine) -> bool:
    """Return whether all weights can stay in RAM, so that nothing is read again."""
    run = engine.live.run
    assert engine.plan is not None
    return engine.plan.weight_bytes <= run.budget.available_bytes + run.budget.by_purpose["weights"]


class Room:
    """Reserves what steps hold while they wait.

    Args:
        engine: The attached engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        build = engine.live.run.build
        resident = set(build.resident)
        self._resident_bytes = sum(build.table[index].layout.nbytes for index in resident)
        self._unit_bytes = max(
            (sum(build.table[index].layout.nbytes for index in unit.pages) for unit in build.units),
            default=0,
        )

    def num_bytes(self, *, spare: bool) -> int:
        """Return how many bytes can be reserved now.

        Args:
            spare: Also count the room for a unit that is read ahead.
        """
        run, plan = self._engine.live.run, self._engine.plan
        assert plan is not None
        purposes = run.budget.by_purpose
        free = run.budget.available_bytes + purposes["weights"] - self._resident_bytes
        free -= self._unit_bytes * (1 if spare else 2)
        # While a model is trained, the plan knows what else may be needed at once.
        return min(free, plan.window_bytes - purposes["waiting steps"])

    def reserve(self, num_bytes: int, *, spare: bool) -> Reservation | None:
        """Reserve the bytes that a step holds; None where they are not there."""
        if num_bytes > self.num_bytes(spare=spare):
            return None
        what = "what a batch holds between units"
        return self._engine.live.run.pool.reserve(num_bytes, "waiting steps", what)
