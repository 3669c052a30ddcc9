"""Every code block of README.md and docs/ runs, or is at least parsed by the command it calls.

Python blocks of a page run in order in one process. Shell blocks run line by line. A comment
`<!-- run: slow -->` above a block keeps it for `--slow`; without, its commands are parsed only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mt_lightning.cli import main
from mt_lightning.plugins.precision import SUPPORTED

from .forked.process import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<slow><!-- run: slow -->\n+)?```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: Languages that are shown and not run: output of a command, and settings quoted from conf/.
SHOWN = {"text", "yaml"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    body: str
    is_slow: bool

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("body")) + 1,
            language=match["language"],
            body=match["body"],
            is_slow=match["slow"] is not None,
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in _blocks(page)]
PYTHON_PAGES = [page for page in PAGES if any(b.language == "python" for b in _blocks(page))]


def _commands() -> list[tuple[Block, str]]:
    found = []
    for block in BLOCKS:
        if block.language == "bash":
            lines = block.body.replace("\\\n", " ").splitlines()
            commands = [shlex.join(shlex.split(line, comments=True)) for line in lines]
            found += [(block, command) for command in commands if command]
    return found


COMMANDS = _commands()
NAMES = [f"{block.name}-{command}" for block, command in COMMANDS]
LONG = [line for block, line in COMMANDS if block.is_slow and line.startswith("megatrain ")]


BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "COLUMNS": "120",
}


def _run(command: list[str], cwd: Path) -> None:
    """Run a command the way a reader would, with the scripts of this environment on PATH."""
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"


def _run_imported(words: list[str], cwd: Path) -> None:
    """Run a script in a process that has everything imported: as above, but seconds sooner."""
    output = cwd / "output.txt"
    done = run(words, cwd=cwd, environment=ENVIRONMENT, output=output)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.output}"


def test_every_block_has_a_known_language() -> None:
    known = {"python", "bash", *SHOWN}
    assert [block.name for block in BLOCKS if block.language not in known] == []
    for page in PAGES:  # an indented fence would be shown, and missed here
        num_fences = len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE))
        assert num_fences == 2 * len(_blocks(page)), page.name


def test_every_page_ends_with_limits() -> None:
    for page in PAGES:
        headings = re.findall(r"^##? (.+)$", page.read_text(), re.MULTILINE)
        assert headings[-1] == "Limits and workarounds", page.name


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = set(re.findall(r"\]\((\w+\.md)\)", index.read_text()))
    assert linked == {page.name for page in index.parent.glob("*.md")} - {index.name}


def test_the_readme_names_every_precision() -> None:
    row = re.search(r"^\| precision \|(.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`([\w-]+)`", row[1])) == set(SUPPORTED)


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize(
    "with_slow", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_python_blocks_run(page: Path, with_slow: bool, tmp_path: Path) -> None:
    blocks = [block for block in _blocks(page) if block.language == "python"]
    if with_slow and not any(block.is_slow for block in blocks):
        pytest.skip("no slow block on this page")
    script = tmp_path / "page.py"
    lines: list[str] = []
    for block in blocks:
        if with_slow or not block.is_slow:
            lines += [""] * (block.line - 1 - len(lines))  # tracebacks show the line of the page
            lines += block.body.splitlines()
    script.write_text("\n".join(lines))
    if with_slow:
        _run([sys.executable, str(script)], tmp_path)
    else:
        _run_imported([str(script)], tmp_path)


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=NAMES)
def test_commands(
    block: Block, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match shlex.split(command):
        case ["make", *targets]:
            _run(["make", "--dry-run", *targets], ROOT)
        case ["megatrain", *arguments] if block.is_slow:
            monkeypatch.chdir(tmp_path)
            assert main([*arguments, "--cfg", "job"]) == 0
        case ["megatrain", *arguments]:
            _run_imported([str(BIN / "megatrain"), *arguments], tmp_path)
        case ["python", script]:
            assert (ROOT / script).is_file()
        case ["pip", "install", *_] | ["git", "clone", _] | ["cd", _]:
            pass
        case _:
            pytest.fail(f"{block.name}: not a command that this test knows: {command}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", LONG)
def test_long_commands(command: str, tmp_path: Path) -> None:
    _run(shlex.split(command), tmp_path)
