"""Curves of `megatrain plan --plot`: memory against the size of the model, time against batch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_lightning.commands.plan.model import find_model
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning.planning.machines import GIB, Machine
from mt_lightning.planning.planner import Answer, answer
from mt_lightning.planning.training import Training
from mt_lightning.planning.work import ModelWork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZES = ("1B", "3B", "8B", "14B", "32B", "70B", "100B")
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


def check_plot(path: Path) -> None:
    """Say before anything is planned that it cannot be drawn.

    Raises:
        ConfigError: matplotlib is not installed, knows no format of that ending, or the file cannot
            be written.
    """
    ending = path.suffix.removeprefix(".").lower()
    if ending not in _figure().canvas.get_supported_filetypes():
        raise ConfigError(
            f"--plot {path}: {ending or 'no ending'!r} is no format that can be drawn. Give a name "
            "ending in .png or .svg."
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"--plot {path} cannot be written: give a file in a directory that exists and may be "
            "written to."
        )


def _figure(**settings: Any) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'mt-lightning[examples]'."
        ) from error
    return Figure(**settings)


def plot(path: Path, training: Training, machine: Machine, found: Answer) -> None:
    """Draw both curves into one file.

    Args:
        path: Where to; its ending decides the format.
        training: The settings.
        machine: The machine.
        found: The answer for the model that was asked for.

    Raises:
        StorageError: The file cannot be written.
    """
    figure = _figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_memory(left, training, machine)
    if found.work is not None:
        _draw_time(right, found, found.work)
    right.set_xlabel("tokens per step")
    right.set_ylabel("tokens per second")
    right.set_title(f"{found.model.name} on {machine.name}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise StorageError(error.errno, f"cannot write the plot: {error.strerror}", path) from error


def _draw_memory(axes, training: Training, machine: Machine) -> None:
    sizes, tiers = [], {"RAM": [], "disk": [], "smallest max_ram_gb": []}
    for name in _SIZES:
        model = find_model(name)
        # Large enough for all, so that the smallest is known of each.
        one = answer(model, training, machine, None, advises=False)
        if one.tiers is None or one.plan is None:
            continue
        sizes.append(model.num_params / 1e9)
        tiers["RAM"].append(one.tiers.ram_peak_bytes / GIB)
        tiers["disk"].append(one.tiers.disk_bytes / GIB)
        tiers["smallest max_ram_gb"].append(one.plan.min_ram_bytes / GIB)
    for name, values in tiers.items():
        axes.plot(sizes, values, marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters, billions")
    axes.set_ylabel("GiB")
    axes.set_title(f"Bytes on {machine.name}")
    axes.legend()


def _draw_time(axes, found: Answer, work: ModelWork) -> None:
    for order, label in ((True, "unit by unit"), (False, "usual order")):
        tokens, speeds = [], []
        for micros in _MICRO_BATCHES:
            options = dataclasses.replace(
                found.training.options, layer_major=order and micros > 1, recompute="auto"
            )
            training = dataclasses.replace(
                found.training, accumulate_grad_batches=micros, options=options
            )
            one = answer(
                found.model, training, found.machine, lambda _: work, build=found.build,
                advises=False,
            )  # fmt: skip
            if one.time is not None:
                tokens.append(one.time.tokens)
                speeds.append(one.time.tokens_per_s)
        axes.plot(tokens, speeds, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.legend()
