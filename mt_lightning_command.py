"""The first word of `megatrain`: help, version and completion, without waiting for torch.

[Note: Beside the package] To import any module of `mt_lightning` is to import Lightning, which
registering the strategy needs: seconds. A shell that completes a line asks at every press of a key.
So what can be said without the package is said here, and all else is left to `mt_lightning.cli`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DESCRIPTION = "Train language models that are larger than memory, on one machine."
COMMANDS = {
    "demo": "fine-tune a real language model in half a gigabyte",
    "train": "train with settings of your own",
    "data": "show what would be trained on: a decoded row, and counts",
    "fit": "train any LightningModule, with settings from YAML files or flags (LightningCLI)",
    "validate": "run its validation",
    "test": "run its test",
    "predict": "run its prediction",
    "doctor": "check memory, drive, limits and versions",
    "bench": "measure what this machine does",
    "export": "write a run or checkpoint for from_pretrained, or in another form",
    "plan": "will it fit, how fast, how long; needs no weights",
    "verify": "check that a run, a checkpoint or an export is whole",
}
CONFIG_NAME = "config"
VERSION_BASE = "1.3"
_OF_HYDRA = ("train", "demo", "data")
_COMPLETION_FLAGS = ("--shell-completion", "-sc")
_LINE = "COMP_LINE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code.

    Args:
        arguments: the words after `megatrain`; None means those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if answer(given):
            return 0
        from mt_lightning import cli  # see [Note: Beside the package]
    except KeyboardInterrupt:
        print("megatrain: interrupted", file=sys.stderr)
        return 130
    return cli.main(given)


def answer(given: Sequence[str]) -> bool:
    """Answer what needs no package, and return whether that was all.

    Args:
        given: the words after `megatrain`.

    Raises:
        SystemExit: if help or the version was asked for, or the first word is no command.
    """
    if given and given[0] in _COMPLETION_FLAGS:
        _complete(given)
        return True
    if not given or given[0] not in COMMANDS:
        _refuse(given)
    return False


def settings_folders() -> tuple[Path, Path]:
    """Return where `conf/` may be: in the package, or beside it in a clone."""
    here = Path(__file__).parent
    return here / "mt_lightning" / "conf", here / "conf"


def _refuse(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="megatrain", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"megatrain {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    if not given or given[0] in ("-h", "--help", "--version"):
        parser.parse_args(given[:1])
        return
    first = next((word for word in given if word in COMMANDS), None)
    if first is not None:
        rest = [word for word in given if word != first]
        parser.error(f"the command comes first: megatrain {first} {' '.join(rest)}")
    meant = difflib.get_close_matches(given[0], COMMANDS, n=1)
    hint = f"did you mean {meant[0]}?" if meant else f"commands are {', '.join(COMMANDS)}."
    parser.error(f"{given[0]!r} is no command; {hint}")


def _version() -> str:
    try:
        return version("mt-lightning")
    except PackageNotFoundError:
        return f"of {Path(__file__).parent}, which is not installed"


def _complete(words: Sequence[str]) -> None:
    """Print what a shell asks for: Hydra's answer, told which command the line is of.

    [Note: who completes] `megatrain -sc install=bash` prints Hydra's function for the shell. The
    shell then calls `megatrain -sc query=bash` with the line so far in COMP_LINE. Hydra takes what
    follows the program's name for settings, so the name of the command is taken out of the line.
    """
    if len(words) != 2 or "=" not in words[1]:
        print(
            f"megatrain: error: {words[0]} needs to know the shell: write megatrain "
            f"{_COMPLETION_FLAGS[1]} install=bash (or zsh, fish), as docs/cli.md shows.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    if words[1].startswith("query="):
        program, *rest = os.environ.get(_LINE, "").split(" ")
        rest = rest or [""]
        if len(rest) == 1:  # the command itself is being typed
            print(" ".join(name for name in sorted(COMMANDS) if name.startswith(rest[0])))
            return
        if rest[0] not in _OF_HYDRA:
            return
        os.environ[_LINE] = " ".join([program, *rest[1:]])
    import hydra

    folder = next(path for path in settings_folders() if (path / f"{CONFIG_NAME}.yaml").is_file())
    before = sys.argv
    sys.argv = ["megatrain", *words]
    try:
        hydra.main(version_base=VERSION_BASE, config_path=str(folder), config_name=CONFIG_NAME)(
            lambda settings: None
        )()
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
