"""The bar on a terminal, and lines without one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

from lightning.pytorch import Trainer
from rich.console import Console

from mt_lightning.callbacks import PagingMonitor, PagingProgressBar
from tests.callbacks.conftest import make_loader

Fit = Callable[..., Trainer]


def run(fit: Fit, *, is_terminal: bool, **settings: object) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=is_terminal, width=110, _environ={"TERM": "xterm"}
    )
    bar = PagingProgressBar(plain_every_n_steps=4, console=console)
    monitor = PagingMonitor(tables=False)
    fit([monitor, bar], enable_progress_bar=True, log_every_n_steps=1, **settings)
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_a_line_every_n_steps(fit: Fit) -> None:
    lines = run(fit, is_terminal=False, accumulate_grad_batches=2).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/8", "step 4/8", "step 8/8"]
    pattern = r"step 8/8  loss \d+\.\d{3}  tok/s \d+  RAM 0\.00 GiB  stall \d+%"
    assert re.fullmatch(pattern, lines[-1])


def test_a_bar_on_a_terminal(fit: Fit) -> None:
    text = run(fit, is_terminal=True, val_check_interval=4, num_sanity_val_steps=1)
    last = text.rstrip().splitlines()[-1].split("\r")[-1]
    assert re.search(r"step 8/8 .*loss \d+\.\d{3}  tok/s \d+  RAM 0\.00 GiB  stall \d+%", last)
    assert "sanity check" in text
    assert "validation" in text


def test_a_disabled_bar_is_silent(fit: Fit) -> None:
    console = Console(file=io.StringIO())
    bar = PagingProgressBar(plain_every_n_steps=1, console=console)
    bar.disable()
    fit([bar], enable_progress_bar=True)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_evaluation_alone(fit: Fit) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    bar = PagingProgressBar(console=console)
    trainer = fit([bar], enable_progress_bar=True, max_steps=1)
    before = len(console.file.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
    trainer.validate(trainer.lightning_module, make_loader(8), verbose=False)
    text = console.file.getvalue()[before:]  # pyright: ignore[reportAttributeAccessIssue]
    assert "validation" in text
    assert "step" not in text
