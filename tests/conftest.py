"""Settings of every test: the process environment, `--slow`, and what is skipped without a GPU."""

from __future__ import annotations

import gc
import os

# Read when torch loads OpenMP, hence before any import of torch; subprocesses inherit it. Spinning
# barriers would take the cores that the paging threads need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # warns after a fork
os.environ.setdefault("MPLBACKEND", "Agg")  # no screen
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each core has its worker already

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_accelerator():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no accelerator"))


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over all that is imported."""
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let them pass over what the tests of a file have left, too: caches, modules, reports."""
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Collect what is garbage by now, and never look at the rest again.

    Many tests ask for a collection, and a sixth of the time of all went into them.
    """
    gc.collect()
    gc.freeze()


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
