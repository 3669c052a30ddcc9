"""How long a step takes, and what it waits for.

[Note: what overlaps] A step is a row of phases: forward and backward sweeps over the units, updates
going along with the last backward, or with the first forward where they must wait. Within a phase
the device computes, the link moves, the drives read and write, and the host updates, all at once; a
phase takes as long as its busiest part. What cannot overlap comes on top: the update of the first
unit, which backward reaches last and the next forward needs first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mt_lightning.engine.build import Build
from mt_lightning.engine.plan import Plan
from mt_lightning.engine.worker import MAX_PENDING
from mt_lightning.pages.table import Page
from mt_lightning.planning.machines import Machine
from mt_lightning.planning.on_device import seconds_there, stays_there
from mt_lightning.planning.tiers import Tiers
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import ModelWork, Work

_UPDATE_BYTES = 12
"""Of weight and gradient, moved through memory for each parameter that is updated."""
_SUM_MOVES = 3
"""Bytes moved to add one: two are read, one is written."""
_CODED_PARAMS_PER_S = 0.19e9
"""Parameters whose lossless state a thread decodes, updates and encodes in a second, measured with
AdamW."""
_CODED_BYTES = 8
"""Of state that AdamW keeps for a parameter."""
_CODING_THREADS = 1
COMPUTE, UP, DOWN, DRIVES, UPDATE = "compute", "link up", "link down", "drives", "update"
EXPOSED = "update of the first unit"


@dataclass(frozen=True)
class Phase:
    """One part of a step.

    Attributes:
        name: What happens.
        times: How often in a step.
        busy_s: Seconds that each part of the machine works, once.
        exposed_s: Seconds that overlap with nothing.
    """

    name: str
    times: int
    busy_s: dict[str, float]
    exposed_s: float = 0.0

    @property
    def bottleneck(self) -> str:
        """The part that works longest."""
        longest = max(self.busy_s, key=lambda part: self.busy_s[part])
        if longest == COMPUTE and self.exposed_s > self.busy_s[COMPUTE]:
            return EXPOSED
        return longest

    @property
    def seconds(self) -> float:
        """How long it takes, once."""
        return max(max(self.busy_s.values()), self.busy_s[COMPUTE] + self.exposed_s)


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
        phases: Its parts.
        read_bytes: Read from the drives.
        written_bytes: Written to the drives.
        flops: Operations of the model; what runs again in backward does not count.
        tokens: Tokens.
    """

    phases: tuple[Phase, ...]
    read_bytes: float
    written_bytes: float
    flops: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(phase.times * phase.seconds for phase in self.phases)

    @property
    def bottleneck(self) -> str:
        """What most of the time is spent on."""
        spent: Counter[str] = Counter()
        for phase in self.phases:
            spent[phase.bottleneck] += phase.times * phase.seconds  # type: ignore[assignment]
        return spent.most_common(1)[0][0]

    @property
    def compute_share(self) -> float:
        """Share of the time in which the device computes."""
        busy = sum(phase.times * phase.busy_s[COMPUTE] for phase in self.phases)
        return busy / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.seconds

    @property
    def flops_per_s(self) -> float:
        """Operations of the model in a second."""
        return self.flops / self.seconds


def time_of_step(
    build: Build, plan: Plan, tiers: Tiers, work: ModelWork, training: Training, machine: Machine
) -> StepTime:
    """Model the time of a step.

    Args:
        build: The pages.
        plan: What stays in RAM.
        tiers: What lies where.
        work: What units compute, for one micro-batch.
        training: The settings.
        machine: The rates.
    """
    micros, num_sweeps = training.accumulate_grad_batches, tiers.inputs.num_groups
    per_sweep = micros / num_sweeps
    read, written = _traffic(plan, micros, num_sweeps)
    device, dtype = machine.device, training.dtype
    overhead = per_sweep * machine.unit_s * len(build.units)

    def compute(units: list[Work], *, backward: bool = False) -> float:
        return per_sweep * sum(w.seconds(device, dtype, backward=backward) for w in units)

    everything = [*work.units, work.outside]
    again = [w for i, w in enumerate(work.units) if i not in tiers.kept_graphs]
    forward_s = compute(everything) + overhead
    backward_s = compute(everything, backward=True) + compute(again) + overhead
    grads = sum(page.layout.grad_bytes for page in build.table)
    backward_s += fresh_seconds(
        per_sweep * grads + sum(w.live_bytes for w in work.units), plan, machine
    )
    # Of all micro-batches of a step the first one's gradients are added to nothing.
    backward_s += summed_seconds((micros - 1) / num_sweeps * grads, machine)

    spilled_inputs = tiers.disk.get("inputs of units", 0)
    # What stays on the device is old once it has been updated on the host: the first forward of a
    # step brings all weights up, the sweeps after it what does not stay.
    there = stays_there(plan) and not machine.on_host
    weights = 0 if machine.on_host or there else plan.weight_bytes
    staying = min(weights, tiers.staying_bytes)
    crossing = 0 if plan.on_device is None else tiers.inputs.away_bytes
    leaving = sum(page.layout.waiting_bytes for page in build.table)
    down = 0 if machine.on_host or there else leaving
    first_up_s = weights / device.up_bytes_per_s
    up_s = (weights - staying) / device.up_bytes_per_s

    # The plan counts pages; what updates and spills move is what sweeps do not.
    waits = plan.schedule == "deferred"
    num_spills = num_sweeps - (not waits)
    spills = plan.spilled_bytes * num_spills
    update_read = plan.state_read_bytes
    swept = max(0.0, read - update_read - spills) / num_sweeps / 2
    update_written = max(0.0, written - spills)
    spill = plan.spilled_bytes if num_spills else 0

    updated = [page for page in build.table if page.layout.optimizer is not None]
    # By the thread that trains, on the stream that computes.
    there_s = there * sum(seconds_there(page, machine) for page in updated)

    def drives(read_bytes: float, written_bytes: float) -> float:
        return machine.disk_seconds(read_bytes, written_bytes)

    def forward(name: str, times: int, *, updates: bool = False, first: bool = False) -> Phase:
        busy = {
            COMPUTE: forward_s + updates * there_s,
            UP: first_up_s if first else up_s,
            DOWN: crossing / device.down_bytes_per_s,
            DRIVES: max(
                updates * in_a_row_s,
                drives(
                    swept + updates * (update_read + plan.spilled_bytes),
                    spilled_inputs + updates * update_written,
                ),
            ),
            UPDATE: updates * update_s,
        }
        return Phase(name, times, busy, first_s if updates else 0.0)

    def backward(name: str, times: int, *, updates: bool = False, again: bool = False) -> Phase:
        spilling = not updates and spill
        busy = {
            COMPUTE: backward_s + updates * there_s,
            UP: up_s + crossing / device.up_bytes_per_s,
            DOWN: down / device.down_bytes_per_s,
            DRIVES: max(
                updates * in_a_row_s,
                drives(
                    swept
                    + spilled_inputs
                    + (plan.spilled_bytes if (updates or again) and spill else 0)
                    + updates * update_read,
                    spilling + updates * update_written,
                ),
            ),
            UPDATE: updates * update_s,
        }
        return Phase(name, times, busy, first_s if updates else 0.0)

    weights_written = 0 if plan.keeps_weights else sum(page.layout.nbytes for page in updated)
    state_bytes = sum(page.state.nbytes for page in updated) or 1
    moved = update_read / state_bytes, max(0.0, update_written - weights_written) / state_bytes
    per_page = {
        page.index: page_seconds(page, *moved, not plan.keeps_weights, training, machine)
        for page in updated
        if not there
    }
    update_s = (not there) * sum(update_seconds(page, training, machine) for page in updated)
    # Pages are stepped one at a time: where their drives take longer, drives are waited for.
    in_a_row_s = sum(in_a_row for in_a_row, _ in per_page.values())
    in_a_row_s *= in_a_row_s > update_s
    first = build.units[0].pages if build.units else ()
    first_s = sum(per_page[index][1] for index in first if index in per_page)

    if waits:
        phases = [forward("forward with updates", 1, updates=True, first=True)]
        phases += [forward("forward", num_sweeps - 1)] if num_sweeps > 1 else []
        phases.append(backward("backward", 1))
        phases += [backward("backward, adding", num_sweeps - 1, again=True)] * (num_sweeps > 1)
    else:
        phases = [forward("first forward", 1, first=True)]
        phases += [forward("forward", num_sweeps - 1)] * (num_sweeps > 1)
        phases += [backward("backward", num_sweeps - 1, again=True)] * (num_sweeps > 1)
        phases.append(backward("backward with updates", 1, updates=True))
    moved_inputs = num_sweeps * spilled_inputs
    return StepTime(
        tuple(phases),
        read + moved_inputs,
        written + moved_inputs,
        micros * work.flops,
        training.tokens_per_step,
    )


def page_seconds(
    page: Page,
    read_share: float,
    written_share: float,
    writes_weights: bool,
    training: Training,
    machine: Machine,
) -> tuple[float, float]:
    """Return how long the update of a page takes: in a row with others, and alone.

    A file lies whole on one drive, so a page does not move faster than that, however many there
    are. Weights whose state is packed go to disk when all of them are updated, others behind.
    Meanwhile the next page is stepped; the one after it waits, as at most two updates are pending.

    Args:
        page: The page.
        read_share: Of its state, what is read.
        written_share: Of its state, what is written.
        writes_weights: Whether its weights are written too.
        training: The settings.
        machine: The rates.
    """
    stepped = update_seconds(page, training, machine)
    read, written = read_share * page.state.nbytes, written_share * page.state.nbytes
    weights = page.layout.nbytes * writes_weights
    behind = page.state_layout.sliced and not page.state_layout.formats
    if len(machine.drives) == 1:
        begun = max(stepped, machine.file_seconds(read, written + weights * behind))
    else:
        moved = machine.file_seconds(read, written), machine.file_seconds(0, weights * behind)
        begun = max(stepped, *moved)
    ended = begun + machine.file_seconds(0, weights * (not behind))
    # In every other step, one of the two slots, a drive writes these weights and then moves the
    # state of the next page.
    shared = machine.file_seconds(read, written) / 2 * (not behind)
    return max(begun, (ended + shared) / MAX_PENDING), ended


def fresh_seconds(nbytes: float, plan: Plan, machine: Machine) -> float:
    """Return how long it takes to touch memory anew that was given back to the kernel.

    Where weights come and go, each that comes takes the room that freed gradients and activations
    have in the heap.
    """
    if plan.sweep_bytes and machine.on_host and machine.fresh_bytes_per_s is not None:
        return nbytes / machine.fresh_bytes_per_s
    return 0.0


def summed_seconds(nbytes: float, machine: Machine) -> float:
    """Return how long a CPU adds gradients of so many bytes to those of earlier micro-batches."""
    return _SUM_MOVES * nbytes / machine.ram_bytes_per_s if machine.on_host else 0.0


def _traffic(plan: Plan, micros: int, num_sweeps: int) -> tuple[float, float]:
    """Return what a step reads and writes: each sweep more brings as many weights as the others."""
    if micros == 1:
        return plan.usual_traffic
    share = (num_sweeps - 1) / (micros - 1)
    read, written = (
        least + share * (most - least)
        for least, most in zip(plan.window_traffic, plan.usual_traffic, strict=True)
    )
    return read, written


def update_seconds(page: Page, training: Training, machine: Machine) -> float:
    """Return how long the host updates a page."""
    numel = sum(spec.numel for spec in page.layout.params)
    form = _form(training.options.optimizer_compression)
    measured = machine.update_params_per_s.get(form)
    if measured is not None and training.optimizer in ("adam", "adamw"):
        return numel / measured
    moved = _UPDATE_BYTES * numel + 2 * page.state_layout.plain_bytes
    seconds = moved / machine.ram_bytes_per_s
    if form == "lossless":
        coded = page.state_layout.plain_bytes / _CODED_BYTES
        seconds = max(seconds, coded / (_CODING_THREADS * _CODED_PARAMS_PER_S))
    return seconds


def _form(compression: bool | str) -> str:
    if compression is False:
        return "raw"
    return "dynamic" if compression is True else str(compression)
