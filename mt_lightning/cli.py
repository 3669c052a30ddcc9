"""The `megatrain` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import rich
from hydra.errors import HydraException, InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text

from mt_lightning.commands.bench import add_bench_parser, run_bench
from mt_lightning.commands.data import show_data
from mt_lightning.commands.doctor import diagnose
from mt_lightning.commands.export import add_export_parser, run_export
from mt_lightning.commands.finding import Status, findings_table
from mt_lightning.commands.plan import add_plan_parser, run_plan
from mt_lightning.commands.settings import (
    complete_arguments,
    group_choices,
    settings_directory,
)
from mt_lightning.commands.stages import STAGES, run_stage
from mt_lightning.commands.train import train
from mt_lightning.commands.verify import add_verify_parser, run_verify
from mt_lightning.errors import MegaTrainError
from mt_lightning_command import (
    COMMANDS,
    CONFIG_NAME,
    DESCRIPTION,
    VERSION_BASE,
    answer,
)

TRACEBACK_VARIABLE = "MT_TRACEBACK"
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_USER_ERRORS = (
    MegaTrainError,
    HydraException,
    OmegaConfBaseException,
    MisconfigurationException,
)

_TRAIN_HELP = """\
examples:
  megatrain train data.path=my.txt                       your own text
  megatrain train data=chat data.path=talks.jsonl        conversations; shown by megatrain data
  megatrain train model=tiny trainer.max_steps=20        a small model with random weights
  megatrain train model=hf model.model=/path/to/model    any Hugging Face causal LM
  megatrain train strategy.max_ram_gb=1 strategy.offload_dir=/mnt/nvme/run1
  megatrain train optimizer=sgd optimizer.lr=0.02 trainer.accumulate_grad_batches=4
  megatrain train strategy.offload_dir=/mnt/nvme/run1 resume=true   go on after an interruption
  megatrain train strategy=auto                          plain Lightning, to compare

groups and their choices:
{groups}

Any argument of the chosen classes can be set. Hydra's flags work too:
  --cfg job        show the settings of the run and stop
  --multirun, -m   one run for each value: optimizer.lr=1e-5,1e-4

Results go to ./outputs/<date>/<time>. Set MT_TRACEBACK=1 to see where an error came from.
"""
_DEMO_HELP = """\
The demo is `megatrain train` with its default settings; it takes the same overrides. The model is
shown, not saved: add save_model=true to keep it.

"""

_DATA_HELP = """\
It takes the overrides of `megatrain train`, of which those of data and the tokenizer matter:
  megatrain data data.path=my.txt                             a text, in blocks
  megatrain data data=chat data.path=talks.jsonl model=tiny   conversations, over bytes
  megatrain data data=completion data.path=tasks.jsonl data.packing=true --row 3
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    Args:
        arguments: the words after `megatrain`; None means those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if answer(given):
            return 0
        parser = _parser()
        if given[0] in STAGES:  # LightningCLI reads all that follows
            return run_stage(given[0], given[1:])
        options, rest = parser.parse_known_args(given)
        if options.command in _TOOLS:
            if rest:
                parser.error(_not_taken(options.command, rest))
            return _TOOLS[options.command](options)
        if options.command == "data":  # settings behind --row are left over, as they are before it
            flags = [word for word in rest if word.startswith("-")]
            if flags:
                parser.error(_not_taken("data", flags))
            return _data(options.row, [*options.overrides, *rest])
        # Flags of Hydra and overrides may be mixed: take them all as they were written.
        return _train(options.command, given[1:])
    except KeyboardInterrupt:
        print("megatrain: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except _USER_ERRORS as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        _print_error(error)
        return _EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatrain", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = "\n".join(f"  {name}: {', '.join(found)}" for name, found in group_choices().items())
    train_help = _TRAIN_HELP.format(groups=groups)
    for name, text in (("demo", _DEMO_HELP + train_help), ("train", train_help)):
        command = commands.add_parser(
            name,
            help=COMMANDS[name],
            epilog=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"megatrain {name} [GROUP=CHOICE ...] [SETTING=VALUE ...]",
            description=COMMANDS[name],
        )
        command.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    data = commands.add_parser(
        "data",
        help=COMMANDS["data"],
        epilog=_DATA_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="megatrain data [--row N] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
    )
    data.add_argument("--row", type=int, default=0, help="which training row (default: 0)")
    data.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    for name in STAGES:
        commands.add_parser(name, help=COMMANDS[name], add_help=False)
    doctor = commands.add_parser("doctor", help=COMMANDS["doctor"])
    doctor.add_argument(
        "--dir", type=Path, default=Path(), help="where pages would lie (default: here)"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_bench_parser(commands)
    add_export_parser(commands)
    add_plan_parser(commands)
    add_verify_parser(commands)
    return parser


def _not_taken(command: str, rest: Sequence[str]) -> str:
    """Return a sentence on words that a command does not take, and where they may belong."""
    settings = [word for word in rest if "=" in word and not word.startswith("-")]
    way_out = f"see megatrain {command} --help."
    if settings:
        way_out = f"{settings[0]} is a setting of megatrain train."
    elif command == "doctor":
        way_out = f"a directory is named by megatrain doctor --dir {rest[0]}."
    elif command == "plan":
        way_out = "it takes one model; a machine is named by megatrain plan MODEL --machine NAME."
    return f"{command} does not take {' '.join(rest)}; {way_out}"


def _doctor(options: argparse.Namespace) -> int:
    findings = diagnose(options.dir)
    if options.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        Console().print(findings_table(findings))
    return 1 if any(finding.status is Status.BAD for finding in findings) else 0


_TOOLS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": _doctor,
    "bench": run_bench,
    "export": run_export,
    "plan": run_plan,
    "verify": run_verify,
}


def _train(command: str, arguments: Sequence[str]) -> int:
    defaults = ["save_model=false"] if command == "demo" else []
    _run(command, [*defaults, *complete_arguments(arguments)], train)
    return 0


def _data(row: int, arguments: Sequence[str]) -> int:
    quiet = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
    completed = [*complete_arguments(arguments), *quiet]
    _run("data", completed, lambda settings, console: show_data(settings, console, row))
    return 0


def _run(
    command: str, arguments: Sequence[str], work: Callable[[DictConfig, Console], Any]
) -> None:
    failures: list[Exception] = []

    def task(settings: DictConfig) -> Any:
        try:
            return work(settings, rich.get_console())
        except Exception as error:  # told to the caller: Hydra would print it in its own way
            failures.append(error)
            return None

    _run_hydra(command, task, arguments)
    if failures:
        raise _cause(failures[0])


def _run_hydra(command: str, task: Any, arguments: Sequence[str]) -> None:
    """Let Hydra read the arguments as if they were those of the process."""
    before = sys.argv
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"megatrain {command}".strip(), *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors instead of printing and exiting
    try:
        hydra.main(
            version_base=VERSION_BASE,
            config_path=str(settings_directory()),
            config_name=CONFIG_NAME,
        )(task)()
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _cause(error: Exception) -> Exception:
    """Return the error inside Hydra's "error in call to target", which says what to change."""
    while isinstance(error, InstantiationException) and isinstance(error.__cause__, _USER_ERRORS):
        error = error.__cause__
    return error


def _print_error(error: BaseException) -> None:
    text = Text("megatrain: error: ", style="bold red")
    text.append(str(error).strip(), style="not bold default")
    console = Console(stderr=True)
    console.print(text, soft_wrap=True)
    console.print(
        f"Set {TRACEBACK_VARIABLE}=1 to see where it came from.", style="dim", highlight=False
    )


if __name__ == "__main__":
    sys.exit(main())
