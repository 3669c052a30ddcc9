from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import rich
from rich.console import Console


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a cache that is not the user's; shared, so that texts are tokenised once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in an empty directory, and undo what the command does to its process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MT_LIGHTNING_CACHE", str(cache))
    monkeypatch.delenv("MT_TRACEBACK", raising=False)
    # Wide enough that no sentence is broken, and sized the same on every machine.
    monkeypatch.setattr(rich, "_console", Console(width=160))
    names = (None, "mt_lightning", "lightning.pytorch")
    loggers = [logging.getLogger(name) for name in names]
    before = [(list(one.handlers), one.level, one.propagate) for one in loggers]
    handler = signal.getsignal(signal.SIGINT)
    yield tmp_path
    signal.signal(signal.SIGINT, handler)
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for added in set(one.handlers) - set(handlers):
            added.close()
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)
