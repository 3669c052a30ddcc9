"""Train in this process and print what the kernel and the counters say was moved, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from . import gpt


def kernel_bytes() -> tuple[int, int]:
    """Return the bytes that the drives read and wrote for this process, page cache excluded."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


class Kernel(gpt.Counters):
    """Also asks the kernel, from the second step on: the first one imports Python files."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.kernel.append(kernel_bytes())


def main(directory: str, settings: str) -> None:
    kernel = Kernel()
    gpt.train(Path(directory), counters=kernel, **json.loads(settings))
    sys.stdout.write("\n" + json.dumps({"kernel": kernel.kernel, "counters": kernel.after}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
