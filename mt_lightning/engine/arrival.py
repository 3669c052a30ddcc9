"""The start of a run on pages: what a model and its optimizers hold arrives there, or stays.

Until everything has arrived nothing is lost: where the start fails, parameters and optimizers get
their values back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mt_lightning.engine import birth
from mt_lightning.engine.attached import Attached
from mt_lightning.engine.exchange import take_state
from mt_lightning.engine.facade import OptimizerFacade
from mt_lightning.engine.importing import (
    forget_weights,
    give_back,
    give_birth,
    import_weights,
)
from mt_lightning.engine.machine import Machine
from mt_lightning.engine.masters.carried import Rests
from mt_lightning.engine.parking import Parking
from mt_lightning.pages.state import MASTER_REST
from mt_lightning.pages.table import Page


class Arrival:
    """Brings a model and its optimizers to the pages of a run.

    Args:
        root: The model.
        machine: The tiers.
        live: The attached engine.
        parking: Shows the pages of the run.
        facades: The optimizers.
    """

    def __init__(
        self,
        root: nn.Module,
        machine: Machine,
        live: Attached,
        parking: Parking,
        facades: list[OptimizerFacade],
    ) -> None:
        self._root = root
        self._machine = machine
        self._live = live
        self._parking = parking
        self._facades = facades
        self._imported: list[Page] = []
        self._taken: list[dict[int, dict[str, Any]]] = []

    def bring(
        self,
        unborn: dict[int, tuple[int, ...]],
        parked: Parking | None,
        rests: Rests,
        *,
        resumed: bool,
    ) -> None:
        """Write everything to pages, and commit it.

        Args:
            unborn: Strides by `id` of the parameters that hold nothing yet; emptied.
            parked: Where the pages already hold the parameters.
            rests: Those of fp32 masters from the last fit.
            resumed: Whether the pages hold a run that goes on: then they have better.
        """
        run, build = self._live.run, self._live.run.build
        if resumed:
            forget_weights(run, build, self._imported)
        else:
            dtypes = {id(p): p.dtype for p in self._root.parameters() if id(p) in unborn}
            masters = self._live.masters
            import_weights(run, build, parked, unborn, self._imported, masters, rests)
            if unborn:
                give_birth(self._root, run, build, masters, dtypes)
        unborn.clear()
        birth.mark_born(self._root)
        run.writer.flush()
        for index, facade in enumerate(self._facades):
            self._taken.append(facade.take())
            # What an optimizer makes before its first step is no match for what was restored. Rests
            # of masters have arrived with the weights.
            state = {
                position: bare
                for position, entries in self._taken[-1].items()
                if (bare := {k: v for k, v in entries.items() if k != MASTER_REST})
            }
            if state and not resumed:
                take_state(run, self._machine, index, state)
        if not resumed:
            run.steps.commit_now(weights=True)

    def undo(self) -> None:
        """Give everything back after an error."""
        run = self._live.run
        run.worker.abandon()
        with torch.inference_mode(False), torch.no_grad():
            give_back(run, run.build, self._parking, self._imported, self._live.masters)
        for facade, state in zip(self._facades, self._taken, strict=False):
            facade.show(state)
