"""What a run needs and where it goes, from sizes alone and before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mt_lightning.engine.build import Build
from mt_lightning.engine.device_plan import DevicePlan
from mt_lightning.engine.durability import wear_rows
from mt_lightning.engine.needs import (
    file_bytes,
    loading_need,
    longest_range,
    master_bytes_of,
    rest_bytes_of,
    spill_bytes,
    unit_need,
)
from mt_lightning.engine.weight_reads import weight_reads
from mt_lightning.engine.worker import MAX_PENDING
from mt_lightning.errors import BudgetError
from mt_lightning.pages.sizes import ALIGN_BYTES, BLOCK_BYTES, align_up

GIB = 1 << 30
_STREAMING_CHUNKS = 3
_CODED_SHARE = 27 / 32
"""What coding leaves of fp32 Adam state, measured; for what a step is expected to move."""
_THROUGH_BYTES = 4 * ALIGN_BYTES
_NUM_THROUGH = 2
_WHOLE_CHUNK_BYTES = 8 * BLOCK_BYTES
"""Chunks larger than this (whole tensors) stream through one frame, not through three."""


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes; `rows()` is what a start table shows.

    Attributes:
        num_units: Units found.
        num_pages: Pages laid out.
        num_params: Parameters, in elements.
        weight_bytes: All weight planes.
        state_bytes: All state planes.
        grad_bytes: One gradient for every trained parameter, as it waits for its update.
        largest_unit: Name of the unit that decides the smallest budget.
        min_ram_bytes: The smallest budget that works.
        ram_limit_bytes: The budget.
        disk_bytes: All files: both slots of every plane, and spilled gradients.
        schedule: "eager" or "deferred", "none" without optimizers.
        directories: Where the pages lie.
        ring_bytes: Length of each frame that state streams through.
        num_ring: How many of them.
        staging_bytes: Length of each frame that spilled gradients pass through.
        num_staging: How many of them.
        stream_bytes: Length of each frame that coded state passes through.
        num_streams: How many of them.
        inline_stream_bytes: Length of the one for pages that are updated without a worker.
        kept_as: How optimizer state is kept, for people.
        spilled: Pages whose deferred gradients go to disk.
        cached_state: Page and chunk of all state that stays in RAM.
        cached_state_bytes: Its bytes.
        spilled_bytes: Bytes of the gradients that go to disk.
        read_bytes: What a step over all units is expected to read.
        written_bytes: What it is expected to write.
        durability: "step" or "checkpoint".
        keeps_weights: Whether updates leave weights in RAM until they are committed.
        commit_bytes: What a commit writes on top of what the steps have written.
        in_ram: Whether weights, gradients and state all stay in RAM.
        window_bytes: Room for the inputs of units that run for several micro-batches in turn.
        graph_bytes: Room for graphs of units that are kept until backward.
        recompute: True, False or "auto": whether units run again in backward.
        inputs_bytes: Room for the inputs of units in any order; what is above it goes to disk.
        sweep_bytes: What a pass forward and back is expected to read of weights.
        state_read_bytes: What a step is expected to read of optimizer state.
        through_bytes: Length of each frame that inputs are written through.
        num_through: How many of them.
        order: "usual", "layer-major", or "undecided": the usual order until the first window has
            shown whether the other one gives the same.
        order_reason: Why, as a sentence; empty where there was nothing to choose.
        saves: Whether layer-major order moves fewer bytes as soon as a step has two micro-batches.
        usual_traffic: What a step reads and writes in the usual order.
        window_traffic: What it reads and writes in layer-major order.
        rest_bytes: Of the state, what fp32 masters have beside their bfloat16 weights.
        master_bytes: Room for the masters of what is updated, and for its fp32 gradients.
        on_device: What goes to the device, None where the host computes.
    """

    num_units: int
    num_pages: int
    num_params: int
    weight_bytes: int
    state_bytes: int
    grad_bytes: int
    largest_unit: str
    min_ram_bytes: int
    ram_limit_bytes: int
    disk_bytes: int
    schedule: str
    directories: list[str]
    ring_bytes: int
    num_ring: int
    staging_bytes: int
    num_staging: int
    stream_bytes: int = 0
    num_streams: int = 0
    inline_stream_bytes: int = 0
    kept_as: str = ""
    spilled: frozenset[int] = frozenset()
    cached_state: tuple[tuple[int, int], ...] = ()
    cached_state_bytes: int = 0
    spilled_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    durability: str = "step"
    keeps_weights: bool = False
    commit_bytes: int = 0
    in_ram: bool = False
    window_bytes: int = 0
    graph_bytes: int = 0
    recompute: bool | Literal["auto"] = True
    inputs_bytes: int = 0
    sweep_bytes: int = 0
    state_read_bytes: int = 0
    through_bytes: int = 0
    num_through: int = 0
    order: str = "usual"
    order_reason: str = ""
    saves: bool = False
    usual_traffic: tuple[int, int] = (0, 0)
    window_traffic: tuple[int, int] = (0, 0)
    rest_bytes: int = 0
    master_bytes: int = 0
    on_device: DevicePlan | None = None

    def rows(self) -> list[tuple[str, int, str]]:
        """Return (item, bytes, place) for a table of what goes where."""
        where = ", ".join(self.directories)
        rows = [
            ("weights", self.weight_bytes, "disk, two slots; in RAM as they are needed"),
            ("optimizer state", self.state_bytes, "disk, two slots; streamed through RAM"),
        ]
        if self.kept_as and self.state_bytes:
            rows[1] = ("optimizer state", self.state_bytes, f"disk, two slots; {self.kept_as}")
        if self.rest_bytes:
            where_masters = "with the optimizer state; fp32 masters are joined for the update"
            rows.append(("  of it lower halves of masters", self.rest_bytes, where_masters))
        if self.cached_state_bytes:
            rows.append(("  of it kept in RAM", self.cached_state_bytes, "RAM"))
        grads = "RAM, freed by the update behind backward"
        if self.schedule == "deferred":
            grads = "RAM until the update before the next forward"
        rows.append(("gradients", self.grad_bytes, grads))
        if self.spilled:
            rows.append(("  of them spilled", self.spilled_bytes, "disk until the update"))
        if self.recompute == "auto" and self.on_device is None:
            rows.append(("room for graphs of units", self.graph_bytes, "RAM until backward"))
        rows.append(("budget max_ram_gb", self.ram_limit_bytes, "RAM"))
        rows.append((f"  smallest that works ({self.largest_unit})", self.min_ram_bytes, "RAM"))
        if self.schedule != "none":
            rows.append(("  room for inputs of units", self.inputs_bytes, "RAM; the rest on disk"))
        rows.extend(self.on_device.rows() if self.on_device is not None else [])
        rows.append(("files", self.disk_bytes, where))
        if self.schedule != "none":
            rows.extend(wear_rows(self.durability, self.written_bytes, self.commit_bytes))
            rows.extend(order_rows(self))
        return rows

    @property
    def streams_bytes(self) -> int:
        """All frames that coded state passes through."""
        return self.num_streams * self.stream_bytes + self.inline_stream_bytes

    @property
    def traffic(self) -> tuple[int, int]:
        """What a step reads and writes in the order that runs now."""
        return self.read_bytes, self.written_bytes


def order_rows(plan: Plan) -> list[tuple[str, int, str]]:
    """Return rows for a table: in which order accumulated batches run, and what a step reads."""
    if not plan.order_reason:
        return []
    if plan.order != "undecided":
        name = "unit by unit" if plan.order == "layer-major" else "in the usual order"
        return [("read per step", plan.read_bytes, f"batches {name}: {plan.order_reason}")]
    (usual, usual_written), (window, window_written) = plan.usual_traffic, plan.window_traffic
    rows = [
        ("read per step, usual order", usual, f"the first window; {plan.order_reason}"),
        ("  unit by unit", window, "the windows after it, where it gave the same"),
    ]
    if usual_written != window_written:
        rows.insert(1, ("  written", usual_written, "what does not fit goes to disk in between"))
        rows.append(("  written", window_written, "gradients of a step are written once"))
    return rows


def make_plan(
    build: Build,
    *,
    ram_limit_bytes: int,
    directories: list[str],
    schedule: str,
    holds_grads: bool,
    trains: bool,
    in_memory: bool,
    micro_batches: int = 1,
    durability: str = "step",
    layer_major: bool = False,
    recompute: bool | Literal["auto"] = True,
    copies_bytes: int = 0,
) -> Plan:
    """Decide what stays in RAM.

    Args:
        build: The pages.
        ram_limit_bytes: The host budget.
        directories: Where the pages lie.
        schedule: "eager" or "deferred", "none" without optimizers.
        holds_grads: Whether gradients of the whole model exist at once: deferred, or accumulation.
        trains: Whether there are optimizers.
        in_memory: Whether the files lie in memory and are charged to the budget.
        micro_batches: How many are accumulated, for the expected bytes of a step.
        durability: "step", or "checkpoint": then what stays in RAM is written by commits alone.
        layer_major: Whether they run unit by unit.
        recompute: Whether units run again in backward.
        copies_bytes: Host memory that copies to and from a device pass through.

    Raises:
        BudgetError: The budget is too small; `smallest_gb` on the error is one that works.
    """
    resident = [build.table[index] for index in build.resident]
    paged = [page for page in build.table if page.index not in build.resident]
    trained = [page for page in paged if trains and page.layout.optimizer is not None]
    chunk = align_up(max((p.state_layout.largest_chunk_bytes for p in trained), default=0))
    num_ring = (_STREAMING_CHUNKS if chunk <= _WHOLE_CHUNK_BYTES else 1) if chunk else 0
    updated = [page for page in build.table if trains and page.layout.optimizer is not None]
    stream = max((p.state_layout.largest_slot_bytes for p in updated), default=0)
    num_streams = 0
    if stream:
        # One plain chunk is stepped at a time; what is read ahead and written behind is coded.
        num_streams, num_ring = _STREAMING_CHUNKS, min(num_ring, 1)
    staging = max((longest_range(page) for page in trained), default=0)
    num_staging = int(bool(trained))
    # Coded state of resident pages has a frame of its own: the worker may hold all others by then.
    inline = max(
        (p.state_layout.largest_slot_bytes for p in updated if p.index in build.resident), default=0
    )
    files = file_bytes(build)

    master_bytes = master_bytes_of(updated, build.resident)
    fixed = master_bytes + num_ring * chunk + num_streams * stream + inline + num_staging * staging
    num_through = _NUM_THROUGH * trains
    fixed += num_through * _THROUGH_BYTES + copies_bytes
    fixed += files if in_memory else 0
    outside = sum(page.layout.nbytes for page in resident)
    cached = []
    if trains:
        outside += sum(2 * page.layout.grad_bytes for page in resident)
        chunks = [
            (page.index, chunk)
            for page in resident
            if page.layout.optimizer is not None
            for chunk in page.state_layout.chunks
        ]
        cached = [(index, chunk.index) for index, chunk in chunks if chunk.nbytes]
        outside += sum(align_up(chunk.nbytes) for _, chunk in chunks)
    fixed += outside
    if layer_major:
        # Each micro-batch's gradient of a parameter lies beside the sum of those before it.
        fixed += max((s.nbytes for page in trained for s in page.layout.params), default=0)
    needs = [
        (max(unit_need(unit, build, trains), loading_need(unit, build)), unit.name)
        for unit in build.units
    ]
    need, largest = max(needs, default=(0, "parameters outside units"))
    minimum = fixed + need
    if ram_limit_bytes < minimum:
        raise _too_small(ram_limit_bytes, minimum, largest, outside)

    spare = ram_limit_bytes - minimum
    spilled: set[int] = set()
    if holds_grads:
        for page in reversed(trained):
            if page.layout.waiting_bytes <= spare:
                spare -= page.layout.waiting_bytes
            else:
                spilled.add(page.index)
    weights = sum(page.layout.nbytes for page in paged)
    room, cached_bytes = spare - weights, 0
    for page in trained if room > 0 and not spilled else ():
        for c in page.state_layout.chunks:
            if c.nbytes and align_up(c.nbytes) <= room:
                cached.append((page.index, c.index))
                room -= align_up(c.nbytes)
                cached_bytes += c.nbytes
    # Updates that wait hold gradients beside those of the unit at work.
    behind = (MAX_PENDING + 1) * max((page.layout.waiting_bytes for page in trained), default=0)
    graph_bytes = max(0, room - behind) if recompute == "auto" and not spilled else 0
    window_bytes = ram_limit_bytes - minimum - cached_bytes
    if schedule == "deferred":
        window_bytes -= sum(p.layout.waiting_bytes for p in trained if p.index not in spilled)
    inputs_bytes = window_bytes
    if holds_grads and schedule != "deferred" and not layer_major:
        inputs_bytes -= sum(p.layout.waiting_bytes for p in trained if p.index not in spilled)
    spilled_bytes = sum(spill_bytes(build.table[index]) for index in spilled)
    lazy = durability == "checkpoint"
    kept = {key for key in cached if lazy}
    kept_bytes = sum(build.table[p].state_layout.chunks[c].nbytes for p, c in kept)
    keeps_weights = lazy and room >= 0
    updated_bytes = sum(page.layout.nbytes for page in updated)
    num_chunks = sum(page.state_layout.num_kept for page in updated)
    state = sum(page.state_layout.plain_bytes for page in build.table)
    share = _CODED_SHARE if stream else 1.0
    room_of_units = ram_limit_bytes - minimum + need - cached_bytes
    swept = partial(
        weight_reads, build, room_of_units, spilled, eager=schedule == "eager", trains=trains
    )
    state_read = int(share * (sum(p.state_layout.plain_bytes for p in trained) - cached_bytes))

    def moved(num_sweeps: int) -> tuple[int, int]:
        """What a step reads and writes that sweeps over the weights so many times and back."""
        # An eager step takes the last micro-batch's gradients without a detour.
        num_spills = num_sweeps - (schedule == "eager")
        read = swept(num_sweeps=num_sweeps) + state_read
        plain_bytes = sum(page.state_layout.plain_bytes for page in updated)
        written = updated_bytes * (not keeps_weights) + int(share * (plain_bytes - kept_bytes))
        return read + spilled_bytes * num_spills, written + spilled_bytes * num_spills

    usual_traffic, window_traffic = moved(micro_batches), moved(1)
    read_bytes, written_bytes = window_traffic if layer_major else usual_traffic
    return Plan(
        num_units=len(build.units),
        num_pages=len(build.table),
        num_params=sum(spec.numel for page in build.table for spec in page.layout.params),
        weight_bytes=sum(page.layout.nbytes for page in build.table),
        state_bytes=state,
        grad_bytes=sum(page.layout.waiting_bytes for page in build.table),
        largest_unit=largest,
        min_ram_bytes=minimum,
        ram_limit_bytes=ram_limit_bytes,
        disk_bytes=files + spilled_bytes,
        schedule=schedule if trains else "none",
        directories=directories,
        ring_bytes=chunk,
        num_ring=num_ring,
        staging_bytes=staging,
        num_staging=num_staging,
        stream_bytes=stream,
        num_streams=num_streams,
        inline_stream_bytes=inline,
        kept_as="; ".join(sorted({codec.words for codec in build.codecs})),
        spilled=frozenset(spilled),
        spilled_bytes=spilled_bytes,
        cached_state=tuple(cached),
        cached_state_bytes=cached_bytes,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        window_bytes=window_bytes,
        graph_bytes=graph_bytes,
        recompute=recompute,
        inputs_bytes=max(0, inputs_bytes),
        sweep_bytes=swept(num_sweeps=1),
        state_read_bytes=state_read,
        through_bytes=_THROUGH_BYTES,
        num_through=num_through,
        order="layer-major" if layer_major else "usual",
        saves=moved(2) != moved(1),
        usual_traffic=usual_traffic,
        window_traffic=window_traffic,
        rest_bytes=rest_bytes_of(build),
        master_bytes=master_bytes,
        durability=durability,
        keeps_weights=keeps_weights,
        commit_bytes=updated_bytes * keeps_weights + int(share * kept_bytes),
        in_ram=room >= 0 and not spilled and len(cached) == num_chunks,
    )


def _too_small(limit: int, minimum: int, unit: str, outside: int) -> BudgetError:
    smallest_gb = math.ceil(minimum / GIB * 1e6) / 1e6
    stays = f" Of it {outside / 2**20:.1f} MiB are for weights that stay in memory (resident)."
    error = BudgetError(
        f"max_ram_gb={limit / GIB:.6g} is too small: unit {unit} needs {minimum / 2**20:.1f} "
        f"MiB at once (weights, gradients, and the frames that optimizer state streams through)."
        f"{stays if outside >= 1 << 20 else ''} The smallest that works is "
        f"max_ram_gb={smallest_gb:.6f}. Raise it, or name smaller units with units=[...]."
    )
    error.smallest_gb = smallest_gb
    return error
