"""The command `megatrain bench machine`: its arguments, its table, its JSON."""

from __future__ import annotations

import argparse
import logging
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mt_lightning.commands.bench.machine import measure, profile_table
from mt_lightning.commands.output import add_json, progress, show
from mt_lightning.errors import ConfigError, MegaTrainError
from mt_lightning.planning.profile import MachineProfile, profile_path

log = logging.getLogger(__name__)

_GIB = 1 << 30
_LEAST_PARAMS = 1 << 16


def add_machine_parser(benches: Any) -> None:
    """Add `machine` to the benches."""
    parser = benches.add_parser(
        "machine", help="drives, memory, arithmetic and the update, kept for planning"
    )
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        default=[Path()],
        metavar="DIR",
        help="one on each drive that pages may lie on (default: here)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="PATH",
        help=f"the file to keep the rates in (default: {profile_path()})",
    )
    parser.add_argument(
        "--size", type=float, default=1.0, help="GiB of each of two files (default: 1)"
    )
    parser.add_argument(
        "--params", type=float, default=16e6, help="parameters to update (default: 16e6)"
    )
    add_json(parser)


def _beside_earlier(profile: MachineProfile, path: Path) -> MachineProfile:
    """Return a profile with the drives that an earlier one has besides."""
    try:
        earlier = MachineProfile.load(path)
    except MegaTrainError as error:
        log.debug("%s is written anew: %s", path, error)
        return profile
    return replace(profile, drives=earlier.with_drives(profile.drives).drives)


def run_machine(options: argparse.Namespace) -> int:
    """Measure, keep and print. Drives that were measured before and are not named stay."""
    sizes = (options.size, options.params)
    if not all(map(math.isfinite, sizes)) or options.size <= 0 or options.params < _LEAST_PARAMS:
        raise ConfigError(
            f"bench machine: --size must be above 0 (got {options.size}), --params at least "
            f"{_LEAST_PARAMS} (got {options.params})."
        )
    path = options.profile or profile_path()
    with progress() as bar:
        profile = measure(options.directories, int(options.size * _GIB), int(options.params), bar)
    profile = _beside_earlier(profile, path)
    profile.save(path)
    show(options, lambda: asdict(profile), lambda: profile_table(profile, path))
    return 0
