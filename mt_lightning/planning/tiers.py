"""What of a run lies where: device, RAM, page-locked RAM, disk. From the plan that runs take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn

from mt_lightning.engine.build import Build, build_pages
from mt_lightning.engine.graphs.choice import Choice
from mt_lightning.engine.importing import file_sizes
from mt_lightning.engine.memory import RAM_SHARE
from mt_lightning.engine.options import Options
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.plan_choice import choose_plan
from mt_lightning.engine.units import Unit, find_units
from mt_lightning.errors import BudgetError
from mt_lightning.optim.codec import codec_for
from mt_lightning.pages.sizes import BLOCK_BYTES
from mt_lightning.planning.inputs import Inputs, inputs_of
from mt_lightning.planning.machines import GIB, Machine
from mt_lightning.planning.on_device import DEVICE_SHARE, PlannedLink, stays_there
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import ModelWork

LOSS_CHUNK_BYTES = {True: 32 << 20, False: 256 << 20}
"""Logits of a chunk of the loss, on a CPU and on an accelerator."""
_DISK_MARGIN_BYTES = GIB
"""Left free on each drive."""


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    Attributes:
        name: What it is called.
        root: The module, on meta.
        units: Its units.
    """

    name: str
    root: nn.Module
    units: list[Unit]

    @classmethod
    def of(cls, name: str, root: nn.Module, options: Options | None = None) -> Model:
        """Find the units of a module, as these options of a run name them."""
        chosen = options or Options()
        return cls(name, root, find_units(root, chosen.units, chosen.resident))

    @property
    def num_params(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(p.numel() for p in self.root.parameters())


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Bytes of a run by tier; each dict maps an item to its bytes.

    Attributes:
        device: In the memory of the accelerator; empty where the host computes.
        device_limit_bytes: What of it can be used.
        ram: In RAM, as `max_ram_gb` counts it, at the peak.
        ram_peak_bytes: Their sum.
        ram_limit_bytes: The budget.
        ram_beside_bytes: What the host needs beside the budget: live activations.
        locked_bytes: Of RAM, what is page-locked for the accelerator.
        disk: On the drives.
        disk_limit_bytes: Room on them.
        graph_bytes: Room for what units save for backward.
        kept_graphs: Numbers of the units that need not run again in backward.
        staying_bytes: Weights that find room on the device from one sweep to the next.
        inputs: What units receive, and of how many batches at once.
    """

    device: dict[str, int]
    device_limit_bytes: int
    ram: dict[str, int]
    ram_limit_bytes: int
    ram_beside_bytes: int
    locked_bytes: int
    disk: dict[str, int]
    disk_limit_bytes: int
    graph_bytes: int
    kept_graphs: frozenset[int]
    staying_bytes: int
    inputs: Inputs

    @property
    def ram_peak_bytes(self) -> int:
        """What the budget counts at the peak."""
        return sum(self.ram.values())

    @property
    def device_bytes(self) -> int:
        """What the device holds."""
        return sum(self.device.values())

    @property
    def disk_bytes(self) -> int:
        """What the drives hold."""
        return sum(self.disk.values())


def ram_limit(training: Training, machine: Machine) -> int:
    """Return the budget in bytes: what was given, or the share of RAM that the strategy takes."""
    given = training.options.max_ram_gb
    return int(RAM_SHARE * machine.ram_bytes) if given is None else int(given * GIB)


def lay_out(model: Model, training: Training) -> Build:
    """Lay out the pages, as a run would."""
    optimizer = training.make_optimizer(model.root)
    codec = codec_for(optimizer, training.options.optimizer_compression)
    has_rest = (lambda param: True) if training.keeps_masters else None
    rounds = training.options.gradient_dtype == "bf16"
    return build_pages(
        model.root,
        model.units,
        [optimizer],
        {},
        BLOCK_BYTES,
        [codec],
        has_rest,
        rounds=rounds,
        resident=training.options.resident,
    )


def place(build: Build, training: Training, machine: Machine) -> Plan:
    """Decide what stays in RAM, as a run would.

    Raises:
        BudgetError: The RAM is too small.
    """
    micro_batches = training.accumulate_grad_batches
    options = training.options
    layer_major = False if options.recompute is False else options.layer_major
    choose = partial(
        choose_plan,
        build,
        options.durability,
        ram_limit_bytes=ram_limit(training, machine),
        directories=[drive.name for drive in machine.drives],
        schedule=training.schedule,
        micro_batches=micro_batches,
        layer_major=layer_major if micro_batches != 1 else False,
        trains=True,
        in_memory=False,
        recompute=options.recompute,
    )
    if machine.on_host:
        return choose()
    try:
        return choose(link=cast("Any", PlannedLink(machine)), max_vram_gb=options.max_vram_gb)
    except BudgetError as error:
        if "max_vram_gb" not in str(error) or options.max_vram_gb is not None:
            raise
        return choose()  # the device is too small, which is said when its bytes are counted


def runs_layer_major(plan: Plan) -> bool:
    """Return whether batches run unit by unit, once the first window has shown the same."""
    return plan.order != "usual"


def tiers_of(
    build: Build, plan: Plan, work: ModelWork | None, training: Training, machine: Machine
) -> Tiers:
    """Count bytes by tier.

    Args:
        build: The pages.
        plan: What stays in RAM.
        work: What units save and receive; None where that is not known yet: then it counts nothing.
        training: The settings.
        machine: The machine.
    """
    units = work.units if work is not None else ()
    live = max((w.live_bytes for w in units), default=0)
    micros = training.accumulate_grad_batches
    disk_limit = sum(max(0, d.size_bytes - _DISK_MARGIN_BYTES) for d in machine.drives)
    inputs = inputs_of(build, plan, units, micros, disk_limit - plan.disk_bytes)
    on_device = plan.on_device is not None
    device = {} if machine.on_host else _device(build, plan, live, inputs.near_bytes)
    if on_device and inputs.near_bytes:
        device["inputs of units"] = inputs.near_bytes
    device_limit = 0 if machine.on_host else int(DEVICE_SHARE * (machine.device.memory_bytes or 0))
    left = device_limit - sum(device.values())
    graph_bytes = plan.graph_bytes if machine.on_host else _graph_bytes(plan, inputs, left)
    kept = _kept(plan, work, graph_bytes, inputs.group)
    saved = inputs.group * sum(units[index].saved_bytes for index in kept) if units else 0
    if not machine.on_host and saved:
        device["what units save"] = saved
    holds_grads = plan.schedule == "deferred" or training.accumulate_grad_batches > 1
    holds_grads &= not stays_there(plan)
    held = [
        (
            inputs.sizes[index] * (not on_device or index in inputs.away),
            inputs.group * w.saved_bytes * (machine.on_host and index in kept),
        )
        for index, w in enumerate(units)
    ]
    ram = ram_items(build, plan, held, holds_grads)
    files = sum(file_sizes(build.table, plan).values()) - plan.spilled_bytes
    spilled = 0 if on_device else max(0, sum(inputs.sizes) - plan.inputs_bytes)
    disk = {
        "weights, two slots": sum(
            (1 if page.layout.optimizer is None else 2) * page.layout.nbytes for page in build.table
        ),
        "optimizer state, two slots": sum(2 * page.state.nbytes for page in build.table),
        "spilled gradients": plan.spilled_bytes,
        "inputs of units": spilled,
        "checkpoints": training.num_checkpoints * files // 2,
    }
    return Tiers(
        device=device,
        device_limit_bytes=device_limit,
        ram=ram,
        ram_limit_bytes=plan.ram_limit_bytes,
        ram_beside_bytes=live if machine.on_host else 0,
        locked_bytes=0 if machine.on_host else PlannedLink.staging_bytes,
        disk={item: nbytes for item, nbytes in disk.items() if nbytes},
        disk_limit_bytes=disk_limit,
        graph_bytes=graph_bytes,
        kept_graphs=kept,
        staying_bytes=_staying_bytes(plan, device.get("what units save", 0) + inputs.near_bytes),
        inputs=inputs,
    )


def _largest_unit(build: Build) -> int:
    return max(
        (sum(build.table[i].layout.nbytes for i in unit.pages) for unit in build.units), default=0
    )


def _device(build: Build, plan: Plan, live: int, inputs_bytes: int) -> dict[str, int]:
    there = plan.on_device
    if there is not None and there.updates:
        grads = {p.index: p.layout.waiting_bytes for p in build.table}
        of_units = sum(grads[i] for i in grads.keys() - set(build.resident))
        return {
            "weights": there.weight_bytes,
            "gradients": sum(grads.values()),
            "optimizer state": there.home_bytes - of_units,
            "activations of a unit": live,
        }
    resident = sum(build.table[index].layout.nbytes for index in build.resident)
    ahead = _largest_unit(build)
    if there is not None:  # what comes ahead of its use gives way to inputs
        ahead = min(ahead, max(0, there.limit_bytes - there.min_bytes - inputs_bytes))
    return {
        "weights of units": resident + _largest_unit(build) + ahead,
        "gradients of a unit": _largest_grads(build),
        "activations of a unit": live,
    }


def _graph_bytes(plan: Plan, inputs: Inputs, left: int) -> int:
    """Return the room for graphs by the budget of a run, and no more than the device has left."""
    there = plan.on_device
    return 0 if there is None else max(0, min(there.graph_bytes - inputs.near_bytes, left))


def _staying_bytes(plan: Plan, beside: int) -> int:
    """Return what the budget of the device has for weights beside the unit at work."""
    there = plan.on_device
    return 0 if there is None else max(0, there.limit_bytes - there.min_bytes - beside)


def _kept(plan: Plan, work: ModelWork | None, room: int, micros: int) -> frozenset[int]:
    """Return the units that keep what they save, by the policy that chooses them in a run."""
    if work is None or plan.recompute is True:
        return frozenset()
    if plan.recompute is False:
        return frozenset(range(len(work.units)))
    choice, chosen = Choice(room), set[int]()
    for _ in range(2):  # the first pass learns what units save, the second chooses
        chosen = {unit for unit in work.order if choice.wants(unit, 1)}
        for unit in work.order:
            choice.saw(unit, micros * work.units[unit].saved_bytes)
        choice.end_pass()
    return frozenset(chosen)


def ram_items(
    build: Build, plan: Plan, held: Sequence[tuple[int, int]], holds_grads: bool
) -> dict[str, int]:
    """Split what the budget counts at the peak; what does not fit is on disk.

    Args:
        build: The pages.
        plan: What stays in RAM.
        held: What each unit receives, and what of its graph is kept until backward, in bytes; empty
            where that is not known.
        holds_grads: Whether gradients of the whole model exist at once.
    """
    weights = sum(page.layout.nbytes for page in build.table)
    grads, inputs, saved = _most_held(build, plan, held, holds_grads)
    fixed = (
        plan.num_ring * plan.ring_bytes
        + plan.streams_bytes
        + plan.num_staging * plan.staging_bytes
        + plan.num_through * plan.through_bytes
        + plan.master_bytes
        + (0 if plan.on_device is None else PlannedLink.staging_bytes)
    )
    at_work = plan.min_ram_bytes - fixed
    of_unit = min(at_work, _largest_grads(build))
    rest = {
        "frames that state streams through": fixed,
        "the largest unit, with gradients": at_work,
        "optimizer state": plan.cached_state_bytes,
        "gradients": max(0, grads - of_unit),
        "weights of further units": max(0, weights - at_work + of_unit),
        "inputs of units": inputs,
        "what units save": saved,
    }
    left, taken = plan.ram_limit_bytes, {}
    for item, nbytes in rest.items():
        taken[item] = min(nbytes, left)
        left -= taken[item]
    return {item: nbytes for item, nbytes in taken.items() if nbytes}


def _largest_grads(build: Build) -> int:
    """Return the bytes of the gradients of the unit that has most."""
    table = build.table
    return max((sum(table[i].layout.grad_bytes for i in u.pages) for u in build.units), default=0)


def _most_held(
    build: Build, plan: Plan, held: Sequence[tuple[int, int]], holds_grads: bool
) -> tuple[int, int, int]:
    """Return gradients, inputs and graphs where there is most of them together.

    In backward gradients come as graphs and inputs go, unit by unit from the last one; in a forward
    with updates it is the other way round.
    """
    held = held or [(0, 0)] * len(build.units)
    grads = [
        sum(
            build.table[i].layout.waiting_bytes
            for i in unit.pages
            if build.table[i].layout.units[0] == unit.name and i not in plan.spilled
        )
        for unit in build.units
    ]
    if not holds_grads:
        grads = [0] * len(grads)
    points = [
        (sum(grads[at:]), sum(h[0] for h in held[: at + 1]), sum(h[1] for h in held[: at + 1]))
        for at in range(len(grads))
    ]
    return max(points, key=sum, default=(0, 0, 0))
