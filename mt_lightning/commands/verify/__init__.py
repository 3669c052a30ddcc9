"""`megatrain verify`: what lies in a run's directory or a checkpoint, and whether it is whole."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from mt_lightning.commands.finding import findings_table
from mt_lightning.commands.output import progress_of_bytes
from mt_lightning.commands.verify.report import Report
from mt_lightning.commands.verify.run_directory import Begin, group_runs, is_run, verify_run
from mt_lightning.commands.verify.saved_files import verify_checkpoint, verify_safetensors
from mt_lightning.errors import ConfigError, StorageError
from mt_lightning_command import COMMANDS

_EPILOG = """\
examples:
  megatrain verify run1                   a run in one directory
  megatrain verify /mnt/a/run /mnt/b/run  a run on two drives
  megatrain verify last.ckpt model        a checkpoint, standard or linked, and a directory of
                                          safetensors
  megatrain verify run1 --prune           also remove what no commit needs

exit codes: 0 all is whole, 1 something is damaged, 2 it could not be looked at
"""


def add_verify_parser(commands: Any) -> None:
    """Add `verify` to the subparsers of the command line."""
    parser = commands.add_parser(
        "verify",
        help=COMMANDS["verify"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Check that runs, checkpoints and exports are whole. Nothing is changed.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="DIR_OR_CKPT",
        help="offload_dir of a run, checkpoint, or directory of safetensors",
    )
    parser.add_argument(
        "--prune", action="store_true", help="remove files of a run that nothing needs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_verify(options: argparse.Namespace) -> int:
    """Verify and show what was found."""
    with progress_of_bytes() as progress:

        def begin(name: str, nbytes: int) -> Any:
            task = progress.add_task(name, total=nbytes)
            return lambda done: progress.advance(task, done)

        reports = verify(options.paths, begin, prune=options.prune)
    damaged = any(report.damaged for report in reports)
    if options.json:
        found = {"damaged": damaged, "reports": [report.as_dict() for report in reports]}
        print(json.dumps(found, indent=2))
    else:
        console = Console()
        for report in reports:
            title = ", ".join(str(path) for path in report.paths)
            console.print(findings_table(report.findings, title=f"{report.kind} {title}"))
            for leftover in report.pruned or report.leftovers:
                verb = "removed" if report.pruned else "leftover"
                console.print(
                    f"{verb} {leftover.path} ({leftover.nbytes} bytes): {leftover.why}",
                    soft_wrap=True,
                    highlight=False,
                    markup=False,
                )
    return 1 if damaged else 0


def verify(paths: list[Path], begin: Begin, *, prune: bool = False) -> list[Report]:
    """Verify whatever lies at some paths.

    Args:
        paths: Directories of runs, checkpoint files, safetensors files or directories of them.
        begin: Told each task and its bytes; returns what is called as they are done.
        prune: Whether files of a run that no commit needs are removed.

    Raises:
        ConfigError: A path is none of these, or a run is in use and `prune` was asked for.
        StorageError: Something cannot be read at all.
    """
    paths = list(dict.fromkeys(paths))
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist.")
        if path.is_dir() and not is_run(path) and not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"{path} holds neither a run (pages/, checkpoints/, commit.0) nor safetensors. "
                "Give the offload_dir of a run, a checkpoint, or a directory of safetensors."
            )
    runs = [path for path in paths if path.is_dir() and is_run(path)]
    others = [path for path in paths if path not in runs]
    if prune and not runs:
        raise ConfigError("--prune is for runs, and none of these is one.")
    reports = [verify_run(group, begin, prune=prune) for group in group_runs(runs)]
    for path in others:
        single = verify_safetensors if path.is_dir() or _is_safetensors(path) else verify_checkpoint
        try:
            reports.append(single(path, begin))
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(error.errno, f"cannot read: {error.strerror}", str(path)) from error
    return reports


def _is_safetensors(path: Path) -> bool:
    return path.suffix == ".safetensors"
