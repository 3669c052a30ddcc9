"""Says what it costs when one step runs the whole model again and again, as `generate` does."""

from __future__ import annotations

import logging

from mt_lightning.engine.engine import Engine
from mt_lightning.engine.units import Unit
from mt_lightning.engine.window.micro import current

log = logging.getLogger(__name__)

_MANY = 3
"""An encoder and a decoder, or a loss and a score, run parts of the model twice."""


class Sweeps:
    """Counts how often a step goes through the model.

    Args:
        engine: The attached engine.
        name: What the step is called.
        told: What has been said already.
    """

    def __init__(self, engine: Engine, name: str, told: set[str]) -> None:
        self._name = name
        self._told = told
        table = engine.live.run.build.table
        self._bytes = {
            unit.index: sum(table[index].layout.nbytes for index in unit.pages)
            for unit in engine.live.run.build.units
        }
        self._all_bytes = sum(self._bytes.values())
        self._together = engine.options.layer_major is not False
        self._step: object = None
        self._entered_bytes = 0
        self._last: int | None = None

    def begin(self) -> None:
        """A batch begins."""
        self._entered_bytes, self._last = 0, None

    def visit(self, unit: Unit) -> None:
        """A step enters a unit; of several under way, the one that did so first is followed."""
        if self._name + "sweeps" in self._told:
            return
        step = current()
        if self._last is None:
            self._step = step
        if step is not self._step or unit.index == self._last:
            return
        self._last = unit.index
        self._entered_bytes += self._bytes[unit.index]
        if self._entered_bytes < _MANY * self._all_bytes:
            return
        self._told.add(self._name + "sweeps")
        together = "once for all batches that run together" if self._together else "for each batch"
        log.warning(
            "%s runs the model again and again, as generate() does for each token. The weights do "
            "not fit in max_ram_gb, so each token reads %.3f GiB of them, %s.",
            self._name,
            self._all_bytes / 2**30,
            together,
        )
