"""Optimizer state between an attached engine and the outside."""

from __future__ import annotations

from typing import Any

from mt_lightning.engine.machine import Machine
from mt_lightning.engine.optimizer_state import StateImporter, export_state
from mt_lightning.engine.plain import AS_STORED, PlainState
from mt_lightning.engine.runtime import Runtime
from mt_lightning.engine.state_chunks import StateChunks
from mt_lightning.engine.workspace import Workspace
from mt_lightning.optim.codec import StateCodec


def give_state(run: Runtime, machine: Machine, optimizer: int) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer by position of the parameter, as views of mapped files."""
    workspace = _workspace(run, machine)
    plain = PlainState(machine.store, machine.io, workspace, as_stored=AS_STORED.get())
    return export_state(run.build, run.steps.trained[optimizer], plain)


def take_state(
    run: Runtime, machine: Machine, optimizer: int, state: dict[int, dict[str, Any]]
) -> None:
    """Write the state of an optimizer to pages; nothing is pending.

    Args:
        run: The attached engine's parts.
        machine: The tiers.
        optimizer: Index of the optimizer.
        state: State by position of the parameter.
    """
    trained = run.steps.trained[optimizer]
    importer = StateImporter(state_chunks(run, machine, trained.codec))
    by_place = {place: state.get(i, {}) for i, place in enumerate(trained.order)}
    for page in trained.pages:
        states = [by_place.get((page.index, i), {}) for i in range(len(page.layout.params))]
        run.updaters[0].touched |= importer.load(page, states)
    for updater in run.updaters:
        updater.forget()


def state_chunks(run: Runtime, machine: Machine, codec: StateCodec) -> StateChunks:
    """Return what reads and rewrites state planes that `codec` codes."""
    return StateChunks(machine.store, machine.io, _workspace(run, machine), codec)


def _workspace(run: Runtime, machine: Machine) -> Workspace:
    return Workspace(machine.arena, run.pool, run.ring, run.streams)
