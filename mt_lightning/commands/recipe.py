"""`recipe=auto`: settings of a run, chosen from the machine and the model, each with its reason.

[Note: what a recipe may change] Samples per step, precision and the optimizer stay as they are, so
that the run trains the same. A setting that was given on the command line is left alone. State in
fewer bits than it has is tried with `recipe.lossy=true` only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from rich.text import Text

from mt_lightning.commands.plan.model import root_of, worker_for
from mt_lightning.engine.memory import RAM_SHARE, ram_limit_bytes
from mt_lightning.engine.options import Options
from mt_lightning.errors import BudgetError, ConfigError, StorageError
from mt_lightning.huggingface.text_data import TextDataModule
from mt_lightning.planning.advice import Adviser
from mt_lightning.planning.here import machine_here
from mt_lightning.planning.machines import GIB, Device, Drive, Machine, changed
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.profile import MachineProfile
from mt_lightning.planning.tiers import Model
from mt_lightning.planning.training import PRECISIONS, Training
from mt_lightning.tiers.filesystem import free_bytes

_SHORT = {"32": "32-true", "bf16": "bf16-mixed"}
"""What Lightning takes for the same precision."""
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.Adam": "adam",
    "torch.optim.SGD": "sgd",
    "torch.optim.Adafactor": "adafactor",
}
_PACKABLE = ("adam", "adamw")
_GAIN = 0.98
"""A setting gives way to another one that takes less than this share of its time."""
_ASSUMED_FLOPS_PER_CORE = 50e9
_ASSUMED_RAM_BYTES_PER_S = 20e9
_ASSUMED_DRIVE_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class Choice:
    """One setting that was chosen.

    Attributes:
        name: What it is called on the command line.
        value: What was chosen.
        why: The reason, for people.
    """

    name: str
    value: Any
    why: str


def choose(settings: DictConfig, given: Collection[str] = ()) -> list[Choice]:
    """Choose the settings that make a step fastest, of those that fit.

    Args:
        settings: Those of `megatrain train`; `recipe` has the limits of the choice.
        given: Names that the user has set, which stay.

    Raises:
        BudgetError: No settings fit the machine.
        ConfigError: The run is not one that can be planned.
    """
    training = _training_of(settings)
    name = str(settings.model.get("model", "model"))
    model = Model.of(name, root_of(settings, name), training.options)
    free_bytes = max(1, int(ram_limit_bytes(None) / RAM_SHARE))  # 0 would be no machine
    machine, measured = _machine(training.options, free_bytes)
    worker = worker_for(model, on_host=True)
    if "strategy.max_ram_gb" not in given:
        # What is computed beside the budget needs RAM too; it is known once a run is planned.
        training = _with(training, max_ram_gb=None)
        first = answer(model, training, machine, worker, advises=False)
        beside_bytes = 0 if first.tiers is None else first.tiers.ram_beside_bytes
        budget = min(RAM_SHARE * free_bytes, free_bytes - beside_bytes) / GIB
        training = _with(training, max_ram_gb=max(0.01, math.floor(100 * budget) / 100))
    adviser = Adviser(model, machine, worker)
    best: Answer | None = None
    for tried in _candidates(training, given, lossy=bool(settings.recipe.lossy)):
        found = adviser.answer(tried)
        if found is None or found.time is None:
            continue
        if best is None or best.time is None or found.time.seconds < _GAIN * best.time.seconds:
            best = found
    if best is None:
        refused = answer(model, training, machine, worker)
        remedy = refused.remedy or "use a smaller model or more memory"
        raise BudgetError(
            f"recipe=auto found no settings that fit this machine: {' '.join(refused.lacks)} "
            f"The cheapest change: {remedy}."
        )
    return list(_choices(best, training, given, free_bytes, measured))


def apply(settings: DictConfig, choices: Collection[Choice]) -> None:
    """Write the choices into the settings."""
    for choice in choices:
        OmegaConf.update(settings, choice.name, choice.value, force_add=True)


def choices_table(choices: Collection[Choice]) -> Table:
    """Show what was chosen, so that it can be given on the next command line."""
    table = Table(title="recipe=auto chose", title_justify="left", title_style="bold")
    table.add_column("setting", overflow="fold")
    table.add_column("why", overflow="fold")
    for choice in choices:
        value = str(choice.value)
        shown = value.lower() if isinstance(choice.value, bool) else value
        table.add_row(Text(f"{choice.name}={shown}"), Text(choice.why))
    return table


def _training_of(settings: DictConfig) -> Training:
    strategy = settings.strategy
    if not isinstance(strategy, DictConfig):
        raise ConfigError(
            f"recipe=auto sets the budgets of pages, and strategy={strategy} has none. Set "
            "strategy=megatrain, or leave recipe out."
        )
    names = {field.name for field in dataclasses.fields(Options)}
    written: Any = OmegaConf.to_container(strategy, resolve=True)
    options = Options(**{key: value for key, value in written.items() if key in names})
    trainer, data = settings.trainer, settings.data
    accelerator = trainer.get("accelerator") or "auto"  # which takes what Lightning finds
    if accelerator != "cpu" and (accelerator != "auto" or torch.accelerator.is_available()):
        raise ConfigError(
            f"recipe=auto plans for the CPU, not for trainer.accelerator={accelerator} on this "
            "machine. Set trainer.accelerator=cpu; or choose a preset instead, such as "
            "hardware=rtx4090, or set the budgets yourself."
        )
    target = str(settings.optimizer.get("_target_"))
    if target not in _OPTIMIZERS:
        raise ConfigError(
            f"recipe=auto does not know what {target} keeps for each parameter. Choose one of "
            f"{', '.join(_OPTIMIZERS)}, or leave recipe out."
        )
    optimizer = _OPTIMIZERS[target]
    if optimizer == "sgd" and settings.optimizer.get("momentum", 0):
        optimizer = "sgd-momentum"
    given = str(trainer.get("precision") or "32-true")
    precision = _SHORT.get(given, given)
    if precision not in PRECISIONS:
        raise ConfigError(
            f"recipe=auto does not know what trainer.precision={given} takes. Choose one of "
            f"{', '.join(PRECISIONS)}, or leave recipe out."
        )
    own = TextDataModule.__init__.__kwdefaults__ or {}
    return Training(
        batch_size=data.get("batch_size", own["batch_size"]),
        sequence_length=data.get("sequence_length", own["sequence_length"]),
        accumulate_grad_batches=trainer.get("accumulate_grad_batches", 1),
        precision=precision,
        optimizer=optimizer,
        clips_norm=bool(trainer.get("gradient_clip_val"))
        and trainer.get("gradient_clip_algorithm", "norm") == "norm",
        options=options,
    )


def _machine(options: Options, ram_bytes: int) -> tuple[Machine, bool]:
    """Return this machine, and whether its rates were measured."""
    directories = options.directories or [os.curdir]
    try:
        return changed(machine_here(MachineProfile.load(), directories), ram_bytes=ram_bytes), True
    except (StorageError, ConfigError):
        pass  # never measured, or elsewhere: what fits does not depend on rates
    cores = len(os.sched_getaffinity(0))
    flops = _ASSUMED_FLOPS_PER_CORE * cores
    rate = _ASSUMED_DRIVE_BYTES_PER_S
    return Machine(
        name="this machine",
        device=Device(
            name="CPU",
            memory_bytes=None,
            flops_per_s={"float32": flops, "bfloat16": flops},
            memory_bytes_per_s=_ASSUMED_RAM_BYTES_PER_S,
        ),
        ram_bytes=ram_bytes,
        ram_bytes_per_s=_ASSUMED_RAM_BYTES_PER_S,
        drives=tuple(
            Drive(
                name=str(directory),
                size_bytes=max(1, free_bytes(directory)),
                read_bytes_per_s=rate,
                write_bytes_per_s=rate,
            )
            for directory in directories
        ),
    ), False


def _with(training: Training, **options: Any) -> Training:
    return dataclasses.replace(training, options=dataclasses.replace(training.options, **options))


def _candidates(training: Training, given: Collection[str], *, lossy: bool) -> Iterator[Training]:
    """Yield settings to try: those that are asked for first, then others for the same step."""
    per_step = training.batch_size * training.accumulate_grad_batches
    batches = [training.batch_size]
    if not {"data.batch_size", "trainer.accumulate_grad_batches"} & set(given):
        batches += [n for n in range(1, per_step + 1) if per_step % n == 0 and n not in batches]
    forms: list[bool | str] = [training.options.optimizer_compression]
    if "strategy.optimizer_compression" not in given:
        forms += [form for form in (False, "lossless") if form not in forms]
        if lossy and training.optimizer in _PACKABLE and True not in forms:
            forms.append(True)
    orders: list[Any] = [training.options.recompute]
    if "strategy.recompute" not in given:
        orders += [order for order in ("auto", True) if order not in orders]
    for batch, form, recompute in itertools.product(batches, forms, orders):
        tried = dataclasses.replace(
            training, batch_size=batch, accumulate_grad_batches=per_step // batch
        )
        yield _with(tried, optimizer_compression=form, recompute=recompute)


def _choices(
    best: Answer, asked: Training, given: Collection[str], free_bytes: int, measured: bool
) -> Iterator[Choice]:
    assert best.tiers is not None
    assert best.time is not None
    chosen, options = best.training, best.training.options
    rates = "" if measured else ", by rates that are assumed: megatrain bench machine measures them"
    pace = f"{best.time.seconds:.2g} s per step planned{rates}"
    if "strategy.max_ram_gb" not in given:
        peak = best.tiers.ram_peak_bytes / GIB
        fits = "all of the run fits" if best.placement == "RAM" else "the rest goes to the drives"
        yield Choice(
            "strategy.max_ram_gb",
            options.max_ram_gb,
            f"a ceiling, of {free_bytes / GIB:.2f} GiB that are free; {peak:.2f} GiB are planned: "
            f"{fits}",
        )
    same = chosen.batch_size == asked.batch_size
    step = chosen.batch_size * chosen.accumulate_grad_batches
    yield Choice("data.batch_size", chosen.batch_size, pace if not same else f"as asked; {pace}")
    yield Choice(
        "trainer.accumulate_grad_batches",
        chosen.accumulate_grad_batches,
        f"a step has {step} samples, as asked",
    )
    form = options.optimizer_compression
    words = {
        False: "state as it is: no smaller form is faster here",
        "lossless": "every bit kept, fewer bytes moved",
        True: "2-8 bits per value, lossy: faster here, and recipe.lossy allows it",
    }
    yield Choice("strategy.optimizer_compression", form, words.get(form, "as asked"))
    recompute = {
        "auto": "units run again in backward only where what they save has no room",
        True: "running units again in backward is faster than keeping what they save",
    }
    yield Choice(
        "strategy.recompute", options.recompute, recompute.get(options.recompute, "as asked")
    )
