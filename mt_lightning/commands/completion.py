"""Shell completion of `megatrain train`: Hydra's, told which command the line is of.

[Note: who completes] `megatrain -sc install=bash` prints Hydra's function for the shell. The shell
then calls `megatrain -sc query=bash` with the line so far in COMP_LINE. Hydra takes what follows
the program's name for settings, so the name of the command is taken out of the line.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from mt_lightning.errors import ConfigError

FLAGS = ("--shell-completion", "-sc")
_LINE = "COMP_LINE"


def asks_for_completion(words: Sequence[str]) -> bool:
    """Return whether a shell is speaking, or the script for one is wanted."""
    return words[:1] != [] and words[0] in FLAGS


def completed_command(words: Sequence[str], commands: Collection[str]) -> str | None:
    """Return the command line without its command in COMP_LINE, or the commands themselves.

    Args:
        words: the words of the process: the flag, and `install=SHELL` or `query=SHELL`.
        commands: all commands; only those of Hydra have settings to complete.

    Returns:
        What to print, or None where Hydra is to answer.

    Raises:
        ConfigError: if it is not said for which shell.
    """
    if len(words) != 2 or "=" not in words[1]:
        raise ConfigError(
            f"{words[0]} needs to know the shell: write megatrain {FLAGS[1]} install=bash (or zsh, "
            "fish), as docs/cli.md shows."
        )
    if not words[1].startswith("query="):
        return None
    program, *rest = os.environ.get(_LINE, "").split(" ")
    rest = rest or [""]
    if len(rest) == 1:  # the command itself is being typed
        return " ".join(name for name in sorted(commands) if name.startswith(rest[0]))
    if rest[0] not in ("train", "demo", "data"):
        return ""
    os.environ[_LINE] = " ".join([program, *rest[1:]])
    return None
