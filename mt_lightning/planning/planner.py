"""The answer for a model, a machine and settings: does it fit, and how fast is it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mt_lightning.engine.build import Build
from mt_lightning.engine.plan import Plan
from mt_lightning.errors import BudgetError
from mt_lightning.planning.machines import GIB, Machine, changed
from mt_lightning.planning.tiers import Model, Tiers, lay_out, place, ram_limit, tiers_of
from mt_lightning.planning.timing import StepTime, time_of_step
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import ModelWork

Worker = Callable[[Training], ModelWork]
"""Counts what the model computes for a micro-batch of these settings."""


@dataclass(frozen=True)
class Answer:
    """What is known of a run.

    Attributes:
        model: The model.
        machine: The machine.
        training: The settings.
        build: The pages; None where planning ended before.
        plan: What stays in RAM; None where the RAM is too small.
        tiers: What lies where; None with `plan`.
        work: What the model computes; None where it does not fit.
        time: How long a step takes; None where it does not fit.
        lacks: What does not fit, as sentences; empty where all does.
        remedy: The cheapest change that makes it fit, where one was found.
    """

    model: Model
    machine: Machine
    training: Training
    build: Build | None = None
    plan: Plan | None = None
    tiers: Tiers | None = None
    work: ModelWork | None = None
    time: StepTime | None = None
    lacks: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def fits(self) -> bool:
        """Whether the run can start."""
        return not self.lacks

    @property
    def placement(self) -> str:
        """The tier that holds all of the run."""
        if self.plan is None or not self.plan.in_ram:
            return "disk"
        return "RAM"


def answer(
    model: Model,
    training: Training,
    machine: Machine,
    worker: Worker | None,
    *,
    build: Build | None = None,
    advises: bool = True,
) -> Answer:
    """Plan one run.

    Args:
        model: The model.
        training: The settings.
        machine: The machine.
        worker: Counts what the model computes; None: time is not asked for.
        build: The pages, where they have been laid out for these settings.
        advises: Whether to look for a change where it does not fit.

    Raises:
        ConfigError: The model cannot be paged, or settings do not go with it.
    """
    build = build or lay_out(model, training)
    short = Answer(model, machine, training, build)
    try:
        plan = place(build, training, machine)
    except BudgetError as error:
        lacks = (_first(str(error)),)
        found = dataclasses.replace(short, lacks=lacks)
        of_ram = "max_vram_gb" not in str(error)
        smallest_gb = error.smallest_gb if of_ram else None
        return _advised(found, worker, smallest_gb) if advises else found
    tiers = tiers_of(build, plan, None, training, machine)
    lacks = _lacks(tiers, training, machine)
    if lacks or worker is None:  # known without running the model
        found = dataclasses.replace(short, plan=plan, tiers=tiers, lacks=lacks)
        return _advised(found, worker) if advises and lacks else found
    work = worker(training)
    tiers = tiers_of(build, plan, work, training, machine)
    found = dataclasses.replace(
        short, plan=plan, tiers=tiers, work=work, lacks=_lacks(tiers, training, machine)
    )
    if not found.fits:
        return _advised(found, worker) if advises else found
    time = time_of_step(build, plan, tiers, work, training, machine)
    return dataclasses.replace(found, time=time)


def _first(text: str) -> str:
    """Return an error without its advice, which is about one setting only."""
    return text.partition(" Raise ")[0]


def _lacks(tiers: Tiers, training: Training, machine: Machine) -> tuple[str, ...]:
    lacks = []
    if tiers.ram_limit_bytes + tiers.ram_beside_bytes > machine.ram_bytes:
        lacks.append(
            f"RAM: max_ram_gb is {_gib(tiers.ram_limit_bytes)} and what units compute takes "
            f"{_gib(tiers.ram_beside_bytes)} GiB beside it, but {machine.name} has "
            f"{_gib(machine.ram_bytes)} GiB."
        )
    if tiers.device_bytes > tiers.device_limit_bytes:
        lacks.append(
            f"device: {_gib(tiers.device_bytes)} GiB are needed at once, and "
            f"{_gib(tiers.device_limit_bytes)} GiB of {machine.device.name} can be used."
        )
    limit = tiers.disk_limit_bytes
    given = training.options.max_disk_gb
    if given is not None:
        limit = min(limit, int(given * GIB))
    if tiers.disk_bytes > limit:
        lacks.append(
            f"disk: the files take {_gib(tiers.disk_bytes)} GiB, and {_gib(limit)} GiB "
            "can be used (1 GiB per drive is left free)."
        )
    return tuple(lacks)


def _gib(nbytes: float) -> str:
    """Return bytes in GiB; of less than one, the two digits that say something."""
    gib = nbytes / GIB
    return f"{gib:,.1f}" if gib >= 1 else f"{gib:.2g}"


def _advised(found: Answer, worker: Worker | None, smallest_gb: float | None = None) -> Answer:
    """Look for the cheapest change that makes it fit: settings first, then hardware.

    Args:
        found: What does not fit.
        worker: Counts what is not known of the work; None where time is not asked for.
        smallest_gb: The smallest budget that works, where the budget is too small.
    """
    builds = {found.training.options.optimizer_compression: found.build}
    for words, training, machine in _changes(found, smallest_gb):
        form = training.options.optimizer_compression
        try:
            builds[form] = builds.get(form) or lay_out(found.model, training)
            known = found.work is not None and training.tokens == found.training.tokens
            fits = all(
                answer(
                    found.model, training, machine, asked, build=builds[form], advises=False
                ).fits
                for asked in (_least(found), worker)[: 1 if known else 2]
            )
        except ValueError:
            continue  # the change does not go with the model: no packed form of its state
        if fits:
            return dataclasses.replace(found, remedy=words)
    return found


def _least(found: Answer) -> Worker | None:
    """Return what says the least that a smaller batch takes, without running the model."""
    work = found.work
    return None if work is None else lambda training: _scaled(work, found.training, training)


def _scaled(work: ModelWork, before: Training, after: Training) -> ModelWork:
    """Return what a smaller batch computes, and the least that shorter sequences take."""
    share = after.tokens / before.tokens * after.sequence_length / before.sequence_length
    if share == 1:
        return work
    numbers = ("num_ops", "backward_num_ops")

    def scale(each):
        values = {
            name: value if name in numbers else type(value)(value * share)
            for name, value in vars(each).items()
        }
        return type(each)(**values)

    return dataclasses.replace(
        work, units=tuple(map(scale, work.units)), outside=scale(work.outside)
    )


def _changes(found: Answer, smallest_gb: float | None) -> Iterator[tuple[str, Training, Machine]]:
    """Yield changes, the cheapest first."""
    training, machine, options = found.training, found.machine, found.training.options

    def with_options(**changes: object) -> Training:
        return dataclasses.replace(training, options=dataclasses.replace(options, **changes))

    usable_gb = machine.ram_bytes / GIB
    if smallest_gb is not None and options.max_ram_gb is not None and smallest_gb < usable_gb:
        given = _up(smallest_gb)
        yield f"set max_ram_gb={given:g}", with_options(max_ram_gb=given), machine
    if options.max_ram_gb is not None and options.max_ram_gb > 0.8 * usable_gb:
        given = max(0.01, round(0.8 * usable_gb, 2))
        yield f"set max_ram_gb={given:g}", with_options(max_ram_gb=given), machine
    if options.max_vram_gb is not None:
        yield "leave max_vram_gb out", with_options(max_vram_gb=None), machine
    if options.max_disk_gb is not None:
        yield "leave max_disk_gb out", with_options(max_disk_gb=None), machine
    if training.num_checkpoints:
        less = dataclasses.replace(training, num_checkpoints=0)
        yield "keep no checkpoints on these drives", less, machine
    batch = training.batch_size
    while batch > 1:
        batch = (batch + 1) // 2
        more = -(-training.batch_size * training.accumulate_grad_batches // batch)
        smaller = dataclasses.replace(training, batch_size=batch, accumulate_grad_batches=more)
        yield f"set batch_size={batch} and accumulate_grad_batches={more}", smaller, machine
    length = training.sequence_length
    while batch == 1 and length > 1024:
        length //= 2
        shorter = dataclasses.replace(training, batch_size=1, sequence_length=length)
        also = "batch_size=1 and " if training.batch_size > 1 else ""
        yield f"set {also}sequence_length={length}", shorter, machine
    if options.optimizer_compression is False:
        words = "set optimizer_compression=True (2-8 bits per value, lossy)"
        yield words, with_options(optimizer_compression=True), machine
    yield from _hardware(found, smallest_gb)


def _hardware(found: Answer, smallest_gb: float | None) -> Iterator[tuple[str, Training, Machine]]:
    training, machine = found.training, found.machine
    for factor in (2, 4, 8, 16, 32):
        if not machine.drives:
            break
        drives = machine.drives * factor
        more = dataclasses.replace(machine, drives=drives)
        yield f"use {len(drives)} drives of {drives[0].name}", training, more
    if machine.drives and found.tiers is not None:
        gib = 1 + -(-found.tiers.disk_bytes // (len(machine.drives) * GIB))
        drives = tuple(
            dataclasses.replace(drive, size_bytes=max(drive.size_bytes, gib * GIB))
            for drive in machine.drives
        )
        words = f"free {gib:,} GiB of each drive, or name others in offload_dir"
        yield words, training, dataclasses.replace(machine, drives=drives)
    needed = (smallest_gb or ram_limit(training, machine) / GIB) / 0.8
    for gib in (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096):
        if gib > machine.ram_bytes / GIB and gib >= needed:
            yield f"use {gib} GiB of RAM", training, changed(machine, ram_bytes=gib * GIB)
    if machine.on_host:
        return
    for gib in (24, 32, 48, 80, 96, 141, 192, 288):
        if gib * GIB > (machine.device.memory_bytes or 0):
            larger = changed(machine, device_memory_bytes=gib * GIB)
            yield f"use a device with {gib} GiB", training, larger


def _up(gb: float) -> float:
    """Round a budget up to what a person would type."""
    step = 0.01 if gb < 1 else 0.1 if gb < 100 else 1.0
    return round(-(-gb // step) * step, 2)
