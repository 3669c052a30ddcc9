"""The first word of `megatrain`, and what a shell asks to complete a line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mt_lightning as mt
from mt_lightning import cli
from mt_lightning_command import COMMANDS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=tiny", "train"], "the command comes first: megatrain train model=tiny"),
        (["-c", "x.yaml", "fit"], "the command comes first: megatrain fit -c x.yaml"),
        (["trian"], "'trian' is no command; did you mean train?"),
        (["zzz"], "commands are demo, train, data, fit, "),
        (
            ["doctor", "/mnt/a"],
            "does not take /mnt/a; a directory is named by megatrain doctor --dir",
        ),
        (["plan", "rtx4090", "8B"], "does not take 8B; it takes one model; a machine is named by"),
        (["verify", "--fix", "a"], "does not take --fix; see megatrain verify --help"),
        (["plan", "8B", "model=tiny"], "model=tiny is a setting of megatrain train"),
        (["data", "--raw", "3", "model=tiny"], "data does not take --raw"),
    ],
)
def test_words_in_the_wrong_place(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_request:
        cli.main(arguments)
    assert exit_request.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("megatrain tr", {"train"}),
        ("megatrain ", {"demo", "doctor", "fit", "plan", "train"}),
        ("megatrain train model=", {"model=hf", "model=smollm2", "model=tiny"}),
        ("megatrain train optimizer=sgd optimizer.mom", {"optimizer.momentum="}),
        ("megatrain doctor --", set()),
    ],
)
def test_a_line_is_completed(
    line: str,
    expected: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    found = set(capsys.readouterr().out.split())
    assert expected <= found
    assert all(word.startswith(line.split(" ")[-1]) for word in found)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_gets_the_choices_of_a_group(workplace: Path) -> None:
    """As documented: the script is evaluated, and bash calls what it defines."""
    bin_folder = workplace / "bin"
    bin_folder.mkdir()
    program = bin_folder / "megatrain"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mt_lightning_command "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(megatrain -sc install=bash)"\n'
        'COMP_LINE="megatrain train strategy="; COMP_POINT=${#COMP_LINE}; COMP_CWORD=2\n'
        "hydra_bash_completion\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["strategy=auto", "strategy=megatrain"]


def test_the_shell_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_request:
        cli.main(["--shell-completion"])
    assert exit_request.value.code == 2
    assert "install=bash" in capsys.readouterr().err


def test_help_version_and_completion_do_not_wait_for_torch() -> None:
    """One process for all: what one of them imports, the last line finds."""
    program = """
import os, sys
from mt_lightning_command import main

for words in ([], ["--help"], ["--version"], ["trian"], ["-sc"]):
    try:
        main(words)
    except SystemExit:
        pass
os.environ["COMP_LINE"] = "megatrain train optimizer="
assert main(["-sc", "query=bash"]) == 0
assert not {"torch", "lightning", "mt_lightning"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"megatrain {mt.__version__}" in done.stdout
    assert "optimizer=sgd" in done.stdout
    assert all(f"    {name} " in done.stdout for name in COMMANDS)
    assert "did you mean train?" in done.stderr


def test_the_summaries_are_of_the_commands_there_are() -> None:
    parser = cli._parser()
    (commands,) = (action for action in parser._actions if action.dest == "command")
    assert list(commands.choices or ()) == list(COMMANDS)
