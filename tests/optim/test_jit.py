"""A kernel compiles and runs whatever state the directories of its disk cache are in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mt_lightning.optim.jit as tested

KERNEL = f"""
import importlib.util
import logging
import sys

logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="WARNED %(message)s")

# By its path: numba alone is imported, not all of the kit.
spec = importlib.util.spec_from_file_location("jit", {tested.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
jit = module.jit


@jit
def first(x):
    return x + 1.0


@jit
def second(x):
    return 1.0 / x


exec(sys.argv[1])
print("RESULT", first(2.0), second(0.0))
print("HITS", sum(first.stats.cache_hits.values()) + sum(second.stats.cache_hits.values()))
"""


class Place:
    """A kernel module and the three directories where its cache may lie."""

    def __init__(self, root: Path) -> None:
        (root / "source").mkdir()
        self.script = root / "source" / "kernel.py"
        self.script.write_text(KERNEL)
        self.chosen, self.home = root / "chosen", root / "home"
        self.beside = root / "source" / "__pycache__"

    def run(self, between: str = "") -> str:
        places = {
            "NUMBA_CACHE_DIR": str(self.chosen / "numba"),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-W", "error", str(self.script), between],
            env={**os.environ, **places},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "RESULT 3.0 inf" in done.stdout
        return done.stdout

    def cached(self) -> list[Path]:
        return sorted(self.script.parent.parent.rglob("*.nb[ic]"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def block(directory: Path) -> None:
    """Make `directory` a file: nothing below it can be written, not even by root."""
    directory.write_text("")


def test_a_second_process_loads_what_the_first_compiled(place):
    assert "HITS 0" in place.run()
    assert all(place.chosen in path.parents for path in place.cached())
    assert "HITS 2" in place.run()


@pytest.mark.parametrize("blocked", ["chosen", "chosen and beside"])
def test_the_next_directory_is_taken_where_one_cannot_be_written(place, blocked):
    block(place.chosen)
    if "beside" in blocked:
        block(place.beside)
    assert "WARNED" not in place.run()
    taken = place.home if "beside" in blocked else place.beside
    assert place.cached()
    assert all(taken in path.parents for path in place.cached())
    assert "HITS 2" in place.run()


def test_no_writable_directory_costs_one_warning_and_no_failure(place):
    for directory in (place.chosen, place.beside, place.home):
        block(directory)
    for _ in range(2):
        output = place.run()
        assert output.count("WARNED") == 1
        assert "NUMBA_CACHE_DIR" in output
        assert "HITS 0" in output
    assert not place.cached()


def test_a_directory_lost_after_import_costs_one_warning_and_no_failure(place):
    lose = (
        "import pathlib, shutil; "
        f"shutil.rmtree({str(place.chosen)!r}); pathlib.Path({str(place.chosen)!r}).touch()"
    )
    output = place.run(lose)
    assert output.count("WARNED") == 1
    assert "HITS 0" in output


def test_files_cut_short_are_compiled_anew_and_repaired(place):
    place.run()
    for suffix in ("*.nbi", "*.nbc"):
        cut = [path for path in place.cached() if path.match(suffix)]
        assert len(cut) == 2
        for path in cut:
            path.write_bytes(path.read_bytes()[:-20])
        assert "HITS 0" in place.run()
    assert "HITS 2" in place.run()


def test_a_changed_file_in_the_folder_of_a_kernel_makes_it_compile_anew(place):
    place.run()
    for changed in ("kernel.py", "constants.py"):
        with (place.script.parent / changed).open("a") as file:
            file.write("# changed\n")
        assert "HITS 0" in place.run()
    assert "HITS 2" in place.run()
