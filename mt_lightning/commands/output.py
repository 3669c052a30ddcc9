"""How commands show what they found: a bar on stderr meanwhile, then a table or JSON on stdout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import DownloadColumn, Progress, ProgressColumn, TransferSpeedColumn


def progress(*columns: ProgressColumn) -> Progress:
    """Return a bar that leaves nothing behind and keeps off stdout, where JSON may go."""
    return Progress(*columns, console=Console(stderr=True), transient=True)


def progress_of_bytes() -> Progress:
    """Return such a bar with bytes and their speed."""
    return progress(*Progress.get_default_columns()[:-1], DownloadColumn(), TransferSpeedColumn())


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `show` looks at."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def show(
    options: argparse.Namespace, data: Callable[[], Any], table: Callable[[], RenderableType]
) -> None:
    """Print results as the command line asks for them.

    Args:
        options: What was given; `json` decides.
        data: Makes the results JSON data.
        table: Makes them a table.
    """
    if options.json:
        print(json.dumps(data(), indent=2))
    else:
        Console().print(table())
