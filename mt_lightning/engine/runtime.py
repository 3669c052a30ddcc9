"""Everything that exists while an engine is attached, put together under one budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mt_lightning.engine.binding import Binder
from mt_lightning.engine.build import Build
from mt_lightning.engine.commit import Committer
from mt_lightning.engine.device_state import DeviceState
from mt_lightning.engine.gradients import Gradients
from mt_lightning.engine.graphs.keeper import Keeper
from mt_lightning.engine.idle_gradients import complete_idle
from mt_lightning.engine.inputs.place import place_inputs
from mt_lightning.engine.inputs.tier import InputTier
from mt_lightning.engine.leaving import Leaving
from mt_lightning.engine.machine import Machine
from mt_lightning.engine.masters.seen import Seen
from mt_lightning.engine.on_device import move_buffers
from mt_lightning.engine.placement import place_planes
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.spill import Ring, Spiller
from mt_lightning.engine.state_stream import StateStream
from mt_lightning.engine.steps import Steps
from mt_lightning.engine.trained import trained_by
from mt_lightning.engine.update import SelfCheck, Updater
from mt_lightning.engine.usage import Usage
from mt_lightning.engine.worker import UpdateWorker
from mt_lightning.engine.write_back import WriteBack
from mt_lightning.engine.writer import PageWriter
from mt_lightning.pager.budget import Budget, Reservation
from mt_lightning.pager.device_pool import DevicePool
from mt_lightning.pager.planes import Planes
from mt_lightning.pager.pool import PoolEntry, WeightPool
from mt_lightning.pager.read_ahead import ReadAhead
from mt_lightning.pager.stats import Stats
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.tiers.arena import Frame
from mt_lightning.tiers.ledger import keep

INPUTS_AHEAD = 2
"""Executions whose inputs are read ahead where no number is given."""


@dataclass
class Runtime:
    """The parts of an attached engine."""

    root: nn.Module
    build: Build
    plan: Plan
    budget: Budget
    pool: WeightPool
    planes: Planes
    binder: Binder
    gradients: Gradients
    worker: UpdateWorker
    steps: Steps
    writer: PageWriter
    check: SelfCheck | None
    updaters: tuple[Updater, Updater]
    ahead: ReadAhead
    ring: Ring
    streams: Ring
    usage: Usage
    spiller: Spiller
    graphs: Keeper
    inputs: InputTier
    device_state: DeviceState | None
    seen: Seen
    held: list[tuple[Frame, Reservation]]
    resident: list[PoolEntry]

    def end_checking(self) -> SelfCheck | None:
        """Stop comparing parameters before and after an update; return what was found, once."""
        check, self.check = self.check, None
        if check is not None:
            self.worker.drain()
            for updater in self.updaters:
                updater.checking = None
        return check


def start(
    root: nn.Module,
    build: Build,
    plan: Plan,
    machine: Machine,
    optimizers: list[torch.optim.Optimizer],
    stats: Stats,
    committer: Committer,
    *,
    slice_bytes: int,
    nonfinite: str,
    read_ahead: int | None,
    max_disk_bytes: int | None,
) -> Runtime:
    """Reserve what is needed for the whole run and put the parts together."""
    machine.training.switch(None)  # wherever an interrupt had left it
    keep(machine.training)
    budget = Budget(plan.ram_limit_bytes)
    worker = UpdateWorker(machine.watch, machine.working)
    pool = WeightPool(machine.arena, budget, machine.store, machine.io, stats)
    ahead = ReadAhead(
        [unit.pages for unit in build.units],
        [page.layout.nbytes for page in build.table],
        build.resident,
        plan.ram_limit_bytes,
        read_ahead,
    )
    pool.next_use, pool.judge = ahead.next_use, ahead.judge
    pool.eager_bytes = ahead.largest_bytes
    planes, room = place_planes(plan.on_device, plan.graph_bytes, machine.link, pool, budget, stats)
    pool.changes, pool.changed = planes.changes, planes.changed
    binder = Binder(root, build, machine.link.device)
    resident = set(build.resident)
    leaving = Leaving(machine.link, planes, stats)
    there = planes if plan.on_device is not None and plan.on_device.updates else None
    assert there is None or isinstance(there, DevicePool)
    device_state = None if there is None else DeviceState(machine.link, there, stats)
    if there is not None:
        there.budget.reserve(plan.master_bytes, "masters")
    gradients = Gradients(build.table, pool, machine.link, leaving, resident, there)
    held: list[tuple[Frame, Reservation]] = []

    def frame(nbytes: int) -> Frame:
        reservation = budget.reserve(nbytes, "state")
        held.append((machine.arena.alloc(nbytes), reservation))
        return held[-1][0]

    ring = Ring([frame(plan.ring_bytes) for _ in range(plan.num_ring)])
    streams = Ring([frame(plan.stream_bytes) for _ in range(plan.num_streams)])
    inline_streams = Ring([frame(plan.inline_stream_bytes)] if plan.inline_stream_bytes else [])
    staging = Ring([frame(plan.staging_bytes) for _ in range(plan.num_staging)])
    through = [frame(plan.through_bytes) for _ in range(plan.num_through)]
    cached = {}
    for page, chunk in plan.cached_state:
        cached[page, chunk] = frame(build.table[page].state_layout.chunks[chunk].nbytes)
    for index in resident:
        budget.reserve(2 * build.table[index].layout.grad_bytes, "gradients")
    budget.reserve(plan.master_bytes, "masters")
    range_bytes = min(slice_bytes, BLOCK_BYTES)
    check = SelfCheck()
    spiller = Spiller(machine.store, machine.io, stats, staging, range_bytes)
    lazy = plan.durability == "checkpoint"
    state = [
        StateStream(machine.io, ring, frames, cached, keeps=lazy, there=chunks)
        for frames, chunks in ((streams, None), (inline_streams, device_state))
    ]
    updater, inline = (
        Updater(
            machine.store,
            machine.io,
            stream,
            spiller,
            check,
            keeps_weights=plan.keeps_weights,
            inline=is_inline,
        )
        for stream, is_inline in zip(state, (False, True), strict=True)
    )
    inputs = place_inputs(
        plan,
        machine,
        pool,
        budget,
        planes,
        through,
        stats,
        max_disk_bytes=max_disk_bytes,
        read_ahead=INPUTS_AHEAD if read_ahead is None else read_ahead,
    )
    write_back = WriteBack(
        build.table, pool, machine.store, machine.io, state, resident, active=lazy, planes=planes
    )
    trained = [trained_by(index, optimizer, build) for index, optimizer in enumerate(optimizers)]
    seen = Seen()
    steps = Steps(
        build, trained, gradients, pool, worker, updater, inline, spiller, committer,
        stats, set(plan.spilled), nonfinite, write_back, machine.clock, seen, there,
    )  # fmt: skip
    graphs = Keeper(plan.recompute, build, room, stats)
    if isinstance(planes, DevicePool):
        planes.next_use, planes.await_update = ahead.next_use, worker.awaiting
        planes.give_back = lambda: (
            leaving.settle_oldest()
            or (there is None and complete_idle(gradients, pool, resident))
            or graphs.drop_oldest()
            or inputs.relieve()
        )
    steps.awaits = graphs.awaits
    move_buffers(root, machine.link.device)
    return Runtime(
        root=root,
        build=build,
        plan=plan,
        budget=budget,
        pool=pool,
        planes=planes,
        binder=binder,
        gradients=gradients,
        worker=worker,
        steps=steps,
        writer=PageWriter(pool, binder),
        check=check,
        updaters=(updater, inline),
        ahead=ahead,
        ring=ring,
        streams=streams,
        usage=Usage(build),
        spiller=spiller,
        graphs=graphs,
        inputs=inputs,
        device_state=device_state,
        seen=seen,
        held=held,
        resident=[],
    )


def stop(runtime: Runtime, machine: Machine) -> None:
    """Give all memory back."""
    keep(None)
    runtime.worker.close()
    move_buffers(runtime.root, torch.device("cpu"))
    for updater in runtime.updaters:
        updater.forget()
    runtime.inputs.close()
    for entry in runtime.resident:
        runtime.pool.release(entry)
    runtime.resident.clear()
    if runtime.device_state is not None:
        runtime.device_state.close()
    runtime.planes.clear()
    runtime.pool.clear()
    for frame, reservation in runtime.held:
        if frame.in_use():
            machine.arena.forget(frame)
        else:
            machine.arena.free(frame)
        reservation.free()
    runtime.held.clear()
    machine.arena.trim()
