"""A bar that moves while texts are tokenised."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)


@contextmanager
def tokenising(
    name: str, total: int, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """Say what is tokenised, and show how far it is, where a person watches.

    Args:
        name: What is tokenised.
        total: Its rows or bytes.
        console: Where the bar goes; None: the error stream. Without a terminal there is no bar.

    Yields:
        A function that is told how many of them are done since the last call.
    """
    log.info("Tokenising %s ...", name)
    console = Console(stderr=True) if console is None else console
    progress = Progress(
        TextColumn("Tokenising"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=total)
        yield lambda amount: progress.advance(task, amount)
